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
from collections import defaultdict
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray

from trinity_data import errors
from trinity_data.errors import StoreError, StoreLockedError, TrinityError
from trinity_data.job_lock import try_lock
from trinity_data.log_files import LogFiles
from trinity_data.processes import end_with_raylet, machine_id
from trinity_data.schema import STORED
from trinity_data.store.ledger import LEDGER_FILE
from trinity_data.store.participants import AWAY_SECONDS, Participant, Participants, Place
from trinity_data.store.snapshot import Snapshot
from trinity_data.store.store import Store
from trinity_data.store.types import Commit

LOCK_SECONDS = 20.0
"""What a new owner of a store waits for the process before it to end."""
SWEEP_SECONDS = 1.0
PIECE_BYTES = 90_000
"""Ray sends an argument above 100 KB by its object store: for one of 64 rows half of the call's time."""
MAX_PIECES = 16
MARKS = "store_clients"
"""What the keys of `progress` begin with that mark writes as done."""
OPEN_WRITES = 1024
"""A mark takes the place of the one so many writes before; a client has fewer than that without an answer."""


@dataclass(frozen=True)
class Write:
    """A call of a method of `Store` that writes."""

    client: str
    """The id of a `RemoteStore`."""
    number: int
    """From 1 on, in the client's order."""
    method: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    place: Place | None = None
    """Of the participant whose client it is; a write of one that has lost its place is refused."""
    pieces: Mapping[str, int] = field(default_factory=dict)
    """In how many pieces each of its tables comes beside it."""

    @property
    def mark_key(self) -> str:
        """Where its mark stands in `progress`."""
        return f"{MARKS}/{self.client}/{self.number % OPEN_WRITES}"


@dataclass(frozen=True)
class Answer:
    """Errors travel as data, since Ray would bury them in its own."""

    value: Any = None
    error: TrinityError | None = None


@dataclass(frozen=True)
class SentTable:
    """A table on its way to another process, where it is a table again.

    As one buffer, since Ray sends each buffer of a column by itself: for 64 experiences a tenth of the time.
    """

    table: pa.Table

    def __reduce__(self) -> tuple[Any, ...]:
        return _read_table, (_table_bytes(self.table),)


def _table_bytes(table: pa.Table) -> pa.Buffer:
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    return stream.getvalue()


def _read_table(buffer: pa.Buffer | bytes) -> pa.Table:
    return pa.ipc.open_stream(buffer).read_all()


def pieces_of(table: pa.Table) -> list[bytes]:
    """A table as arguments that travel with the call, as long as it is not large."""
    content = memoryview(_table_bytes(table))
    size = PIECE_BYTES if len(content) <= MAX_PIECES * PIECE_BYTES else len(content)
    return [bytes(content[start : start + size]) for start in range(0, len(content), size)]


def _whole(write: Write, pieces: Sequence[bytes]) -> Write:
    """With its tables, which came in pieces, in their place."""
    if not write.pieces:
        return write
    rest = iter(pieces)
    tables = {name: _read_table(b"".join(islice(rest, number))) for name, number in write.pieces.items()}
    if write.method == "submit":
        (commit,) = write.arguments
        return replace(write, arguments=(replace(commit, tables=tables),))
    return replace(write, options={**write.options, "with_rows": tables})


@dataclass
class _Turn:
    """Of one client, since the actor's start."""

    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    newest: int = 0
    """The last write that was begun."""
    answers: dict[int, asyncio.Future[Answer]] = field(default_factory=dict)
    """Of the writes that wait for the disk."""


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
        self.participants = Participants(self.store, away_seconds=away_seconds)
        self.turns = defaultdict[str, _Turn](_Turn)
        self.progressed = asyncio.Condition()
        context = ray.get_runtime_context()
        self.started_again = bool(context.was_current_actor_reconstructed)
        self._own, self._idle_seconds = context.current_actor, idle_seconds
        threading.Thread(target=self._watch, name="participants", daemon=True).start()

    async def write(self, write: Write, *pieces: bytes) -> Answer:
        """Does it once, after the client's writes before it; answers when it is durable.

        `pieces` are those of its tables, one table after another.
        """
        turn = self.turns[write.client]
        async with turn.changed:
            await turn.changed.wait_for(lambda: self._is_next(write, turn))
            is_repeated = self.started_again or write.number <= turn.newest
            if is_repeated and (done := self._done(write)) is not None:
                return done
            if write.number not in turn.answers:
                turn.answers[write.number] = asyncio.ensure_future(await self._begin(_whole(write, pieces)))
            turn.newest = max(turn.newest, write.number)
            turn.changed.notify_all()
        answer = await asyncio.shield(turn.answers[write.number])
        turn.answers.pop(write.number, None)
        return answer

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
        end = asyncio.get_running_loop().time() + seconds
        async with self.progressed:
            while True:
                values = {key: self.store.progress(key) for key in keys} | self.store.progress_below(below)
                left = end - asyncio.get_running_loop().time()
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
        await asyncio.to_thread(self.store.close)

    def _watch(self) -> None:
        """Notices who has ended; and ends this process, in a cluster of others, when nobody is left."""
        idle_since = time.monotonic()
        while True:
            time.sleep(SWEEP_SECONDS)
            self.participants.sweep()
            if self.participants.present:
                idle_since = time.monotonic()
            elif self._idle_seconds is not None and time.monotonic() - idle_since > self._idle_seconds:
                self.store.close()
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

    def _is_next(self, write: Write, turn: _Turn) -> bool:
        before = replace(write, number=write.number - 1)
        return before.number <= turn.newest or (self.started_again and self._done(before) is not None)

    def _done(self, write: Write) -> Answer | None:
        """What came of it, as the ledger says."""
        mark = self.store.progress(write.mark_key)
        if mark is None or mark["number"] != write.number:
            return None
        return Answer(error=getattr(errors, mark["error"])(mark["message"]) if mark["error"] else None)

    async def _begin(self, write: Write) -> Awaitable[Answer]:
        """Commits may wait for the disk together; other writes end before the next begins."""
        if write.place is not None:
            try:
                self.participants.note_alive(write.place)
            except StoreLockedError as error:
                return asyncio.sleep(0, Answer(error=error))
        if write.method == "submit":
            return self._commit(write)
        method = getattr(self.store, write.method)
        answer = await _answer(asyncio.to_thread(method, *write.arguments, **write.options))
        return self._marked(write, answer)

    async def _commit(self, write: Write) -> Answer:
        (commit,) = write.arguments
        marked = replace(commit, progress={**commit.progress, write.mark_key: _mark(write, None)})
        answer = await _answer(self._submitted(marked))
        if commit.progress:
            async with self.progressed:
                self.progressed.notify_all()
        return answer if answer.error is None else await self._marked(write, answer)

    async def _submitted(self, commit: Commit) -> None:
        await asyncio.wrap_future(self.store.submit(commit))

    async def _marked(self, write: Write, answer: Answer) -> Answer:
        """The answer, once its mark is durable."""
        await self._submitted(Commit(progress={write.mark_key: _mark(write, answer.error)}))
        return answer


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


def _mark(write: Write, error: TrinityError | None) -> dict[str, Any]:
    kind = "" if error is None else type(error).__name__
    return {"number": write.number, "error": kind, "message": str(error or "")}


async def _answer(call: Awaitable[Any]) -> Answer:
    try:
        value = await call
        return Answer(SentTable(value) if isinstance(value, pa.Table) else value)
    except TrinityError as error:
        return Answer(error=error)
    # the boundary between processes: what else the store raises goes to the caller
    except Exception as error:
        return Answer(error=StoreError(f"{type(error).__name__}: {error}"))
