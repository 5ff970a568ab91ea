"""Calls of the process that owns a store."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, RayActorError, RayError

from trinity_data.errors import StoreError
from trinity_data.processes import machine_id
from trinity_data.store.local_writes import LocalAddress, LocalClient
from trinity_data.store.messages import Answer, pieces_of
from trinity_data.store.shared_bytes import Parts

MAX_RESTARTS = 5
"""Of the process that owns the store, in its life."""
ACTOR_ENDED = (RayActorError, ActorUnschedulableError)
"""The second where its machine is lost."""
_LOOK_SECONDS = 1.0
"""Between two looks at whether the store can still answer."""


class StoreCalls:
    """Of one client. May be shared between threads."""

    def __init__(self, actor: Any, root: Path) -> None:
        self._actor, self._root = actor, root
        self.lost: StoreError | None = None
        """Why nothing is answered any more."""
        self._connecting = threading.Lock()
        self._is_connected = False
        self._local: LocalClient | None = None

    def value(self, method: str, *arguments: Any) -> Any:
        """What a method of the actor answers."""
        answer = self._by_ray(method, *arguments)
        if answer.error is not None:
            raise answer.error
        return answer.value

    def write(self, content: Parts) -> Answer:
        """The answer to a packed write; it may be sent several times."""
        client = self._connected()
        if client is None:
            return self._by_ray("write", *pieces_of(content))
        try:
            return client.write(content)
        # its process has ended, or is not fast enough: Ray waits for the next one
        except OSError:
            self.disconnect()
            return self._by_ray("write", *pieces_of(content))

    def disconnect(self) -> None:
        """The next write connects again."""
        with self._connecting:
            if self._local is not None:
                self._local.close()
            self._is_connected, self._local = False, None

    def refuse_if_lost(self) -> None:
        """Raises what has made the store lost."""
        if self.lost is not None:
            raise self.lost

    def _connected(self) -> LocalClient | None:
        """None on another machine."""
        with self._connecting:
            if not self._is_connected:
                address: LocalAddress | None = self._by_ray("local_address").value
                if address is not None and address.machine == machine_id():
                    self._local = LocalClient(address)
                self._is_connected = True
            return self._local

    def _by_ray(self, method: str, *arguments: Any) -> Answer:
        self.refuse_if_lost()
        reference = getattr(self._actor, method).remote(*arguments)
        while True:
            try:
                answer: Answer = ray.get(reference, timeout=_LOOK_SECONDS)
                return answer
            except GetTimeoutError:
                self.refuse_if_lost()
            except ACTOR_ENDED as error:
                raise actor_ended(self._root, error) from error


def actor_ended(root: Path, error: RayError) -> StoreError:
    """For people."""
    return StoreError(
        f"the process that owns {root} ended more than {MAX_RESTARTS} times, or was stopped; "
        f"what was answered is durable: run the same command again ({error})"
    )
