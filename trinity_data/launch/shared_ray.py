"""A run of several processes on one Ray: how each of them joins, and how it notices that Ray or its place in
the run is gone.

Where RAY_ADDRESS names a cluster it is that one. Else it is a Ray of this machine that the first process of
the job starts (`ray_host`), and that ends after the last.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from trinity_data.config import RunConfig
from trinity_data.errors import ClusterLostError, PlaceHeldError, StoreError
from trinity_data.launch.cluster import (
    LOOPBACK,
    computing_environment,
    joined_ray,
    ray_options,
)
from trinity_data.launch.job_folder import job_folder
from trinity_data.launch.named_ray import ClusterWatch, is_named, named_ray
from trinity_data.launch.ray_host import RayHost, find_or_start_host, running_host, store_name
from trinity_data.log_files import LogFiles
from trinity_data.nodes import this_node
from trinity_data.store.calls import ACTOR_ENDED
from trinity_data.store.ledger import LEDGER_FILE
from trinity_data.store.messages import Answer
from trinity_data.store.participants import Participant
from trinity_data.store.remote import RemoteStore, local_reader, start_store
from trinity_data.store.types import Place
from trinity_data.weights import node_folder

log = logging.getLogger(__name__)

SIGN_SECONDS = 2.0
"""Between two signs of life."""
IDLE_SECONDS = 10.0
"""After which the store ends itself in a cluster that is not ours, where nobody takes part any more."""
JOIN_SECONDS = 120.0
"""That the store's process may take to start, also when it is started again."""
LEAVE_SECONDS = 5.0
# a Ray that was found may be about to end
_ATTEMPTS = 3


@dataclass(frozen=True)
class SharedRun:
    """What one process has of the run."""

    env: Mapping[str, str]
    """That ranks and engines must be given, because they do not inherit it."""
    store: RemoteStore
    participant: str
    lost: Future[None]
    """Fails with ClusterLostError or StoreError when this process can take part no longer."""

    async def until_lost(self) -> None:
        """Never returns; raises what `lost` fails with. For a task beside the others."""
        await asyncio.shield(asyncio.wrap_future(self.lost))


@contextmanager
def shared_run(config: RunConfig, participant: str, *, session: int = 0) -> Iterator[SharedRun]:
    """Takes part in the job of `config` under the name `participant` until the block ends; `session` as of
    `Participant`.

    Raises StoreLockedError where another process has the name, or runs the whole job by itself.
    """
    with ExitStack() as stack:
        job_dir = stack.enter_context(job_folder(config, shared=True))
        wait_seconds = config.sync_timeout if session else 0.0
        host = stack.enter_context(_connected(config, job_dir, wait_seconds))
        # with the weights of other processes of the job, also where those are killed
        stack.callback(node_folder(job_dir, this_node()).close)
        env = computing_environment(config)
        if host is not None:
            env |= {name: os.environ.get(name, value) for name, value in LOOPBACK.items()}
        idle_seconds = IDLE_SECONDS if host is None else None
        arguments = {"idle_seconds": idle_seconds, "logs": LogFiles.of_job(job_dir, config.log)}
        joining = Participant.this_process(participant, session=session)
        actor, place = _join(job_dir, joining, wait_seconds, **arguments)
        root = job_dir / "store"
        store = RemoteStore(actor, root, place=place, reader=local_reader(actor, root))
        watch = _Watch(store, actor, place, job_dir, host)
        stack.callback(watch.leave)
        yield SharedRun(env, store, participant, watch.lost)


@contextmanager
def _connected(config: RunConfig, job_dir: Path, wait_seconds: float) -> Iterator[RayHost | None]:
    """Yields the host of our own Ray; None with a cluster of others, for which it waits so long."""
    options = ray_options(config)
    if is_named():
        with named_ray(wait_seconds=wait_seconds, **options):
            yield None
        return
    namespace = options.pop("namespace")
    with ExitStack() as stack:
        for attempt in range(1, _ATTEMPTS + 1):
            host = find_or_start_host(job_dir, namespace)
            try:
                stack.enter_context(joined_ray(host.address, host.token, namespace=host.namespace, **options))
                break
            except (ConnectionError, RayError) as error:
                if attempt == _ATTEMPTS or running_host(job_dir) == host:
                    raise ClusterLostError(f"cannot connect to the Ray of {job_dir}: {error}") from error
        yield host


def _join(
    job_dir: Path, participant: Participant, wait_seconds: float, **arguments: Any
) -> tuple[Any, Place]:
    """The store's actor, which is started with these arguments where there is none, and this process's
    place. `wait_seconds` as of `_store_actor`.
    """
    end = time.monotonic() + wait_seconds + JOIN_SECONDS
    while True:
        actor = _store_actor(job_dir, participant, wait_seconds, **arguments)
        try:
            answer: Answer = ray.get(actor.join.remote(participant), timeout=JOIN_SECONDS)
        except GetTimeoutError as error:
            raise StoreError(
                f"the process that owns {job_dir / 'store'} did not answer for {JOIN_SECONDS:g} seconds; "
                "`ray list actors` says where it is"
            ) from error
        except ACTOR_ENDED as error:
            # it has ended for want of participants, or cannot open the store
            if "creation task" in str(error) or time.monotonic() > end:
                raise StoreError(f"{job_dir / 'store'} cannot be opened: {error}") from error
            time.sleep(0.2)
            continue
        if isinstance(answer.error, PlaceHeldError) and time.monotonic() < end:
            # by a process whose machine may be lost: the store soon knows
            time.sleep(SIGN_SECONDS)
            continue
        if answer.error is not None:
            raise answer.error
        return actor, answer.value


def _store_actor(job_dir: Path, participant: Participant, wait_seconds: float, **arguments: Any) -> Any:
    """Who has taken part begins no store of its own where that of the run lies on another machine: it waits
    so long for somebody to open that one again. Raises StoreError.
    """
    name, end, waits = store_name(job_dir), time.monotonic() + wait_seconds, False
    while participant.session and not (job_dir / "store" / LEDGER_FILE).exists():
        with suppress(ValueError):
            return ray.get_actor(name)
        todo = f"the {name}, which lies on another machine; run the command that it has there"
        if time.monotonic() > end:
            raise StoreError(
                f"for {wait_seconds:g} seconds (synchronizer.sync_timeout) nobody has opened {todo}, then "
                "this one again"
            )
        if not waits:
            log.warning("waits, at most %g s (synchronizer.sync_timeout), for %s", wait_seconds, todo)
        waits = True
        time.sleep(0.2)
    return start_store(job_dir / "store", shared_as=name, **arguments)


def _lost(job_dir: Path, what: str) -> ClusterLostError:
    return ClusterLostError(
        f"the Ray that the processes of {job_dir} share has ended ({what}); "
        "what was answered is durable, and the same command goes on from there"
    )


class _Watch:
    """A thread that gives signs of life of this process, and looks whether it can still take part."""

    def __init__(
        self, store: RemoteStore, actor: Any, place: Place, job_dir: Path, host: RayHost | None
    ) -> None:
        self.store, self.lost = store, Future[None]()
        self._actor, self._place, self._job_dir, self._host = actor, place, job_dir, host
        self._cluster = ClusterWatch() if host is None else None
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="participant", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Gives the place up, where anybody is left to take note of it."""
        self._leaving.set()
        self._thread.join()
        if self._cluster is not None:
            self._cluster.close()
        if not self.lost.done():
            self.store.close()
            with suppress(RayError):
                ray.get(self._actor.leave.remote(self._place), timeout=LEAVE_SECONDS)

    def _run(self) -> None:
        answered = time.monotonic()
        while not self._leaving.is_set():
            try:
                self._look()
                answered = time.monotonic()
            except (GetTimeoutError, RayError) as error:
                # Ray starts the store's process again; more than that is the end
                if isinstance(error, ACTOR_ENDED) or time.monotonic() - answered > JOIN_SECONDS:
                    self._give_up(_lost(self._job_dir, f"the process of its store: {error}"))
                    return
            except StoreError as error:
                self._give_up(error)
                return

    def _look(self) -> None:
        sign = self._actor.note_alive.remote(self._place)
        for _ in range(int(SIGN_SECONDS / 0.2)):
            if self._leaving.wait(0.2):
                return
            if self._host is not None and running_host(self._job_dir) != self._host:
                raise _lost(self._job_dir, f"process {self._host.process}")
            if self._cluster is not None:
                self._cluster.look()
        answer: Answer = ray.get(sign, timeout=SIGN_SECONDS)
        if answer.error is not None:
            raise answer.error

    def _give_up(self, error: StoreError) -> None:
        self.store.give_up(error)
        self.lost.set_exception(error)
