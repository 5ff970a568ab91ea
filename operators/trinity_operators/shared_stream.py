"""The tasks of a set that several explorers share: one at a time reads the set, and all take what it stores,
in the order of the set.

Where the one that reads is gone, another goes on from the position on record.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.dataset.task import Task, tasks_from_table
from trinity_data.errors import TrinityError
from trinity_data.lease import Lease
from trinity_data.progress import TasksProgress, tasks_key
from trinity_data.store.participants import KEY
from trinity_data.store.protocol import SharedStore

# a wait for news is asked for again, so that one that is gone is no reason to wait without end
_WAIT_SECONDS = 20.0


class Stream(Protocol):
    """A `TaskStream` or a `QueueStream`."""

    async def next(self) -> Task | None: ...
    def start(self) -> None: ...
    async def close(self) -> None: ...


class SharedStream:
    """Kept tasks in their order. Closed with the stage."""

    def __init__(
        self, store: SharedStore, stage: str, taskset: str, *, lease: Lease, open_stream: Callable[[], Stream]
    ) -> None:
        """`open_stream` makes the stream that reads the set, for the explorer that has the lease."""
        self.store, self.stage, self.taskset = store, stage, taskset
        self.lease, self.open_stream = lease, open_stream
        self._stream: Stream | None = None
        self._num_read, self._num_rows = 0, 0
        """Tasks that were read, and rows of the table that were looked at."""
        self._stored, self._ahead = deque[Task](), deque[Task]()
        """Of others, to be read; and read ahead of this explorer."""
        self._turn = asyncio.Lock()
        self._num_wanted = 0
        self._starting: asyncio.Task[None] | None = None
        self._reading_on: asyncio.Task[None] | None = None
        self._failure: TrinityError | None = None

    def start(self) -> None:
        """Begins reading, where no other explorer does."""
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._begin())

    async def next(self) -> Task | None:
        """The next task that no operator dropped, or None at the end of the set."""
        async with self._turn:
            if self._failure is not None:
                raise self._failure
            return self._ahead.popleft() if self._ahead else await self._read()

    def read_to(self, num_tasks: int) -> None:
        """Others have taken so many tasks: where this explorer reads the set, it reads on as far."""
        self._num_wanted = max(self._num_wanted, num_tasks)
        if self._stream is not None and (self._reading_on is None or self._reading_on.done()):
            self._reading_on = asyncio.get_running_loop().create_task(self._read_on())

    async def close(self) -> None:
        for task in (self._starting, self._reading_on):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        if self._stream is not None:
            await self._stream.close()

    async def _begin(self) -> None:
        async with self._turn:
            try:
                if self._stream is None and await asyncio.to_thread(self.lease.take):
                    await self._go_on()
            except TrinityError as error:
                self._failure = error

    async def _read_on(self) -> None:
        while self._num_read < self._num_wanted:
            async with self._turn:
                try:
                    task = await self._read()
                except TrinityError as error:
                    self._failure = error
                    return
                if task is None:
                    return
                self._ahead.append(task)

    async def _read(self) -> Task | None:
        task = await self._next_stored()
        if task is None and self._stream is not None:
            task = await self._stream.next()
        self._num_read += task is not None
        return task

    async def _next_stored(self) -> Task | None:
        """The next task that another explorer has read; None at the end, and where this explorer reads."""
        seen: dict[str, Any] = {}
        key = tasks_key(self.stage, self.taskset)
        while self._stream is None:
            progress = TasksProgress.load(await asyncio.to_thread(self.store.progress, key))
            if not self._stored:
                self._stored.extend(await asyncio.to_thread(self._new_tasks))
            if self._stored:
                return self._stored.popleft()
            if progress.exhausted:
                return None
            if await asyncio.to_thread(self.lease.take):
                await self._go_on()
                return None
            seen = await self.store.news(seen, (key, KEY), self.lease.key, _WAIT_SECONDS)
        return None

    async def _go_on(self) -> None:
        """Reads the set from where the others have come to."""
        stream = self.open_stream()
        stream.start()
        for _ in range(self._num_read):
            await stream.next()
        self._stream = stream
        self.read_to(self._num_wanted)

    def _new_tasks(self) -> list[Task]:
        """Kept ones of the rows that were committed since the last call."""
        tasks, (_, end) = list[Task](), self.store.row_range("tasks")
        while self._num_rows < end:
            rows = self.store.rows_from("tasks", self._num_rows).slice(0, end - self._num_rows)
            self._num_rows += rows.num_rows
            of_stage = pc.equal(rows["stage"], pa.scalar(self.stage))
            of_set = pc.and_(of_stage, pc.equal(rows["taskset"], pa.scalar(self.taskset)))
            tasks += tasks_from_table(rows.filter(pc.and_(of_set, rows["kept"])).sort_by("position"))
        return tasks
