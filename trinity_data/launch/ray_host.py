"""The process that owns the Ray of a job with several processes: `python -m trinity_data.launch.ray_host`.

The first of them starts it. It ends itself, with Ray and the store, a few seconds after the last of them has
ended, and at once when a process of Ray's is gone: what was answered is durable, and they start another one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import ray
from ray.exceptions import RayError

from trinity_data.atomic import replace_text
from trinity_data.errors import StoreLockedError, TrinityError
from trinity_data.job_lock import ENDING, hold, is_held, try_lock
from trinity_data.launch.cluster import is_whole, kill_left, own_ray
from trinity_data.nodes import this_node
from trinity_data.weights import node_folder

HOST_FILE = "ray.json"
LOCK_FILE = "ray.lock"
"""Held by the host, from before its start until its end."""
LOG_FILE = "ray_host.log"
STORE = "store"
"""The name of the store's actor in the namespace of its job is this, a space, and project/name."""
LINGER_SECONDS = 3.0
START_SECONDS = 120.0
CLOSE_SECONDS = 30.0
_LOOK_SECONDS = 0.2
_MAX_STARTS = 3


@dataclass(frozen=True)
class RayHost:
    """How a process of this user reaches the Ray of the job."""

    address: str
    token: str
    namespace: str
    process: int


def find_or_start_host(job_dir: Path, namespace: str) -> RayHost:
    """The host of the job. Raises TrinityError where none can be started."""
    end, starts = time.monotonic() + START_SECONDS, 0
    while time.monotonic() < end:
        if (host := running_host(job_dir)) is not None:
            return host
        starts += _start_if_there_is_none(job_dir, namespace)
        if starts > _MAX_STARTS:
            break
        time.sleep(_LOOK_SECONDS)
    log = job_dir / "log" / LOG_FILE
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    raise TrinityError(
        f"Ray did not start for {job_dir} ({log}): {' '.join(lines[-3:]) or 'it said nothing'}"
    )


def running_host(job_dir: Path) -> RayHost | None:
    """The one that has started and not ended."""
    descriptor = _open_lock(job_dir)
    try:
        if try_lock(descriptor, shared=True):
            return None
    finally:
        os.close(descriptor)
    try:
        return RayHost(**json.loads((job_dir / HOST_FILE).read_text()))
    except FileNotFoundError:  # it is starting
        return None


def _start_if_there_is_none(job_dir: Path, namespace: str) -> bool:
    descriptor = _open_lock(job_dir)
    try:
        if not try_lock(descriptor):
            return False
        # with the lock in hand: what an earlier host left, which was killed
        _clear(job_dir)
        (job_dir / "log").mkdir(exist_ok=True)
        with (job_dir / "log" / LOG_FILE).open("ab") as log:
            subprocess.Popen(
                [sys.executable, "-m", __name__, str(job_dir), namespace, str(descriptor)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[descriptor],  # and with it the lock
                start_new_session=True,
            )
        return True
    finally:
        os.close(descriptor)


def _open_lock(job_dir: Path) -> int:
    return os.open(job_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)


def _clear(job_dir: Path) -> None:
    """Ends what is left of a host that was killed, and forgets it."""
    file = job_dir / HOST_FILE
    with suppress(FileNotFoundError):
        kill_left(json.loads(file.read_text())["token"])
        file.unlink()


def serve(job_dir: Path, namespace: str, lock: int) -> None:
    """Owns Ray while anybody takes part in the job."""
    os.set_inheritable(lock, False)
    with own_ray(namespace=namespace, log_to_driver=False, logging_level="ERROR") as token:
        host = RayHost(ray.get_runtime_context().gcs_address, token, namespace, os.getpid())
        replace_text(job_dir / HOST_FILE, json.dumps(asdict(host)), mode=0o600)
        with ExitStack() as stack:
            # with the weights, also between two commands
            stack.callback(node_folder(job_dir, this_node()).close)
            try:
                _wait_for_the_end(job_dir, stack)
            finally:
                (job_dir / HOST_FILE).unlink()
            if is_whole():
                _close_store(job_dir, namespace)


def _wait_for_the_end(job_dir: Path, stack: ExitStack) -> None:
    """Returns when nobody takes part, with the job's lock on `stack`, or when Ray is not whole."""
    last_held = time.monotonic()
    while is_whole():
        time.sleep(_LOOK_SECONDS)
        if is_held(job_dir):
            last_held = time.monotonic()
        elif time.monotonic() - last_held > LINGER_SECONDS:
            # somebody may have come in between
            with suppress(StoreLockedError):
                stack.enter_context(hold(job_dir, ENDING))
                return


def _close_store(job_dir: Path, namespace: str) -> None:
    with suppress(ValueError, RayError):  # there is none, or its process ended
        ray.get(ray.get_actor(store_name(job_dir), namespace).close.remote(), timeout=CLOSE_SECONDS)


def store_name(job_dir: Path) -> str:
    """Of the store's actor; jobs may share a namespace."""
    return f"{STORE} {job_dir.parent.name}/{job_dir.name}"


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
