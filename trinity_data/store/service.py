"""The store in a Ray actor, where several processes take part in a run: one process owns the ledger, the
others write and read through it.

A write is answered when it is durable. Ray repeats calls whose answer it lost, to an actor that it has
started again where need be. Each write of a client has a number, and the ledger marks the numbers that are
done, so that none is done twice and all are done in the client's order.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray

from trinity_data.errors import StoreError, StoreLockedError, TrinityError
from trinity_data.job_lock import try_lock
from trinity_data.log_files import LogFiles
from trinity_data.processes import end_with_raylet, machine_id
from trinity_data.schema import STORED
from trinity_data.store.client_writes import ClientWrites
from trinity_data.store.ledger import LEDGER_FILE
from trinity_data.store.local_writes import listen
from trinity_data.store.messages import Answer, SentTable, unpack
from trinity_data.store.participants import AWAY_SECONDS, Participant, Participants
from trinity_data.store.snapshot import Snapshot
from trinity_data.store.store import Store
from trinity_data.store.types import Place

LOCK_SECONDS = 20.0
"""What a new owner of a store waits for the process before it to end."""
SWEEP_SECONDS = 1.0


@dataclass(frozen=True)
class LedgerFile:
    """Where the ledger is, for a process that wants to read it without the actor's help."""

    machine: str
    device: int
    inode: int

    @classmethod
    def of(cls, root: Path) -> LedgerFile | None:
        try:
            found = (root / LEDGER_FILE).stat()
        except OSError:
            return None
        return cls(machine_id(), found.st_dev, found.st_ino)


class StoreActor:
    """Opens the store in folder `root`, which fences any other writer.

    With `idle_seconds` it ends itself when nobody has taken part for so long.
    """

    def __init__(
        self,
        root: Path,
        *,
        idle_seconds: float | None = None,
        away_seconds: float = AWAY_SECONDS,
        logs: LogFiles | None = None,
    ) -> None:
        end_with_raylet()
        if logs is not None:
            logs.take_over("store")
        root.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(root)
        self.store = Store.create_or_open(root)
        self.progressed = asyncio.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        """That of the news."""
        self.participants = Participants(
            self.store, away_seconds=away_seconds, on_progress=self._tell_progress
        )
        context = ray.get_runtime_context()
        self.writes = ClientWrites(
            self.store,
            self.participants,
            started_again=bool(context.was_current_actor_reconstructed),
            on_progress=self._tell_progress,
        )
        self.local_writes = listen(self.writes.accept)
        self._own, self._idle_seconds = context.current_actor, idle_seconds
        threading.Thread(target=self._watch, name="participants", daemon=True).start()

    async def write(self, *pieces: bytes) -> Answer:
        """The answer to a packed write, which comes in pieces."""
        return await asyncio.shield(asyncio.wrap_future(self.writes.accept(unpack(b"".join(pieces)))))

    async def local_address(self) -> Answer:
        """Of the faster way for processes of this machine; None where there is none."""
        return Answer(self.local_writes.address if self.local_writes is not None else None)

    async def ask(self, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Answer:
        """What a method of `StoreReader` returns."""
        return await _answer(asyncio.to_thread(getattr(self.store, method), *arguments, **options))

    async def snapshot(self) -> Answer:
        """As `ask`; the rows of every table are in memory."""
        return await _answer(asyncio.to_thread(self._snapshot))

    async def news(self, seen: dict[str, Any], keys: list[str], below: str, seconds: float) -> Answer:
        """The progress of `keys`, and of all that begin with `below`: once it differs from `seen`, or after
        so many seconds.
        """
        self._loop = asyncio.get_running_loop()
        end = self._loop.time() + seconds
        async with self.progressed:
            while True:
                values = {key: self.store.progress(key) for key in keys} | self.store.progress_below(below)
                left = end - self._loop.time()
                if values != seen or left <= 0:
                    return Answer(values)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.progressed.wait(), left)

    async def join(self, participant: Participant) -> Answer:
        """The place of a new participant."""
        return await _answer(asyncio.to_thread(self.participants.join, participant))

    async def leave(self, place: Place) -> Answer:
        """Gives a place up."""
        return await _answer(asyncio.to_thread(self.participants.leave, place))

    async def note_alive(self, place: Place) -> Answer:
        """A sign of life of a participant; StoreLockedError where it has lost its place."""
        return await _answer(asyncio.to_thread(self.participants.note_alive, place))

    async def ledger_file(self) -> LedgerFile | None:
        """Which file is the ledger."""
        return LedgerFile.of(self.store.root)

    async def process_id(self) -> int:
        """Of the process on its own machine; another one after a restart."""
        return os.getpid()

    async def close(self) -> None:
        """Writes what was begun and lets go of the files."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self.store.close()
        if self.local_writes is not None:
            self.local_writes.close()

    def _tell_progress(self) -> None:
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._notify(), self._loop)

    async def _notify(self) -> None:
        async with self.progressed:
            self.progressed.notify_all()

    def _watch(self) -> None:
        """Notices who has ended; and ends this process, in a cluster of others, when nobody is left."""
        idle_since = time.monotonic()
        while True:
            time.sleep(SWEEP_SECONDS)
            self.participants.sweep()
            if self.participants.present:
                idle_since = time.monotonic()
            elif self._idle_seconds is not None and time.monotonic() - idle_since > self._idle_seconds:
                self._close()
                ray.kill(self._own)
                return

    def _snapshot(self) -> Snapshot:
        """The newest one, with its sealed rows in memory too."""
        snapshot = self.store.snapshot()
        tables: dict[str, Any] = {
            # rows are only ever added
            name: SentTable(self.store.table(name).slice(0, snapshot.version.num_rows.get(name, 0)))
            for name in STORED
        }
        return Snapshot(
            snapshot.root, snapshot.version, [], {name: list[Path]() for name in STORED}, tables, []
        )


def _lock(root: Path) -> int:
    """Holds the store for this process until it ends, however it ends; its epoch would not keep two
    clusters from taking it from each other in turn.
    """
    descriptor = os.open(root / "service.lock", os.O_RDWR | os.O_CREAT, 0o600)
    end = time.monotonic() + LOCK_SECONDS
    while not try_lock(descriptor):
        if time.monotonic() > end:
            os.close(descriptor)
            raise StoreLockedError(
                f"{root} is owned by a process of another Ray; stop what runs there, or give all "
                "commands of this job the same RAY_ADDRESS"
            )
        time.sleep(0.1)
    return descriptor


async def _answer(call: Awaitable[Any]) -> Answer:
    try:
        value = await call
        return Answer(SentTable(value) if isinstance(value, pa.Table) else value)
    except TrinityError as error:
        return Answer(error=error)
    # the boundary between processes: what else the store raises goes to the caller
    except Exception as error:
        return Answer(error=StoreError(f"{type(error).__name__}: {error}"))
