"""The Ray cluster that RAY_ADDRESS names: how a command finds it, waits for it, and notices its loss."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError

from trinity_data.errors import ClusterLostError, NoClusterError
from trinity_data.nodes import ray_is_lost, reach

log = logging.getLogger(__name__)

CONTROL_SECONDS = 30.0
"""That the cluster's control process may be away, as while it is started again. After 60 Ray ends each
process that is still connected.
"""
LOOK_SECONDS = 0.2
_TRY_SECONDS = 1.0


def is_named() -> bool:
    """Whether the user names a cluster, which others may use too."""
    return bool(os.environ.get("RAY_ADDRESS"))


@contextmanager
def named_ray(*, wait_seconds: float = 0.0, **options: Any) -> Iterator[None]:
    """Connects to the cluster until the block ends, for which it waits so many seconds (`sync_timeout`).
    Raises NoClusterError.
    """
    address, end, waits = os.environ["RAY_ADDRESS"], time.monotonic() + wait_seconds, False
    while (error := _try_to_connect(address, options)) is not None:
        if time.monotonic() > end:
            waited = f" for {wait_seconds:g} seconds (synchronizer.sync_timeout)" if wait_seconds else ""
            raise NoClusterError(
                f"found RAY_ADDRESS {address!r}, where no Ray cluster answers{waited} ({error}); start one "
                "there, name another, or unset RAY_ADDRESS to run on this machine alone; the same command "
                "then goes on"
            ) from error
        if not waits:
            log.warning(
                "waits for a Ray cluster at RAY_ADDRESS %r, at most %g s (synchronizer.sync_timeout)",
                address,
                wait_seconds,
            )
        waits = True
        time.sleep(_TRY_SECONDS)
    try:
        yield
    finally:
        ray.shutdown()


def _try_to_connect(address: str, options: dict[str, Any]) -> Exception | None:
    """Why there is no connection."""
    try:
        # where nothing answers, Ray alone takes minutes to find that out
        if ":" in address and "://" not in address:
            reach(address)
        ray.init(**options)
    # RuntimeError: of a cluster that has no raylet on this machine yet
    except (OSError, RayError, RuntimeError) as error:
        ray.shutdown()
        return error
    return None


class ClusterWatch:
    """Whether the cluster that this process is connected to is there: its control process, and the raylet of
    this machine.
    """

    def __init__(self) -> None:
        self._raylet = socket.socket(socket.AF_UNIX)
        self._raylet.setblocking(False)
        # where that fails, so does a look
        self._raylet.connect_ex(ray._private.worker._global_node.raylet_socket_name)
        self._answered = self._looked = time.monotonic()

    def close(self) -> None:
        self._raylet.close()

    def look(self) -> None:
        """Raises ClusterLostError."""
        if self._has_ended():
            raise _lost("Ray's raylet on this machine has ended")
        now = time.monotonic()
        if now - self._looked < _TRY_SECONDS:
            return
        self._looked = now
        if not ray_is_lost():
            self._answered = time.monotonic()
        elif time.monotonic() - self._answered > CONTROL_SECONDS:
            raise _lost(f"its control process has not answered for {CONTROL_SECONDS:g} seconds")

    def _has_ended(self) -> bool:
        try:
            return not self._raylet.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True


def _lost(what: str) -> ClusterLostError:
    return ClusterLostError(
        f"the cluster of RAY_ADDRESS {os.environ['RAY_ADDRESS']!r} is lost ({what}); what was recorded is "
        "durable"
    )


async def until_cluster_is_lost() -> None:
    """Raises ClusterLostError once it is. For a task beside the others."""
    watch = ClusterWatch()
    try:
        while True:
            await asyncio.to_thread(watch.look)
            await asyncio.sleep(LOOK_SECONDS)
    finally:
        watch.close()
