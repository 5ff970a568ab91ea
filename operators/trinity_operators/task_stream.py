"""The task set on its way through the task operators, as one Ray Data execution that lasts
as long as it is needed.

The reader asks a feed for credit before every chunk, so that the stream is never more than a window ahead of
the explorer. Every row comes out with what the operators said of it; the store gets the row and the decisions
in one commit.
"""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.exceptions import RayError

from trinity_data.dataset.task import Task, tasks_from_table
from trinity_data.errors import OperatorError, TrinityError
from trinity_data.processes import end_with_raylet
from trinity_data.progress import TasksProgress, tasks_key
from trinity_data.status import Status
from trinity_data.store.commit import Commit
from trinity_data.store.store import Store
from trinity_operators.chunk import CHUNK_ROWS, StreamSpec, from_bytes, to_bytes


class CreditLimiter:
    """Credit for the reader: rows asked for, less rows the explorer has taken or the operators dropped."""

    def __init__(self, window: int) -> None:
        end_with_raylet()
        self.window, self.out, self.acknowledged, self.closed = window, 0, 0, False
        self.at_work, self.since = "", time.monotonic()
        self.changed = asyncio.Condition()

    async def ask(self, rows: int) -> bool:
        """Waits until the rows fit into the window; False when no more are wanted."""
        async with self.changed:
            await self.changed.wait_for(
                lambda: (
                    self.closed
                    or self.out == self.acknowledged
                    or self.out - self.acknowledged + rows <= self.window
                )
            )
            self.out += rows
            return not self.closed

    async def acknowledge(self, rows: int) -> None:
        async with self.changed:
            self.acknowledged += rows
            self.changed.notify_all()

    async def close(self) -> None:
        async with self.changed:
            self.closed = True
            self.changed.notify_all()

    async def is_closed(self) -> bool:
        return self.closed

    async def begin(self, what: str) -> None:
        """An operator begins; empty when none is at work."""
        self.at_work, self.since = what, time.monotonic()

    async def doing(self) -> tuple[str, float]:
        """Which operator is at work, and for how many seconds; empty when none is."""
        return self.at_work, time.monotonic() - self.since


class TaskStream:
    """Kept tasks in their order: those the store has, then those the stream brings. Closed with the stage."""

    def __init__(self, spec: StreamSpec, store: Store, *, window: int, status: Status) -> None:
        self.spec, self.store, self.window, self.status = spec, store, window, status
        self.key = tasks_key(spec.stage, spec.taskset.name)
        self._queue: asyncio.Queue[Task | TrinityError | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._feed: Any = None
        self._thread: threading.Thread | None = None
        self._stored = iter(_stored_tasks(store, spec))

    async def next(self) -> Task | None:
        """The next task that no operator dropped, or None at the end of the set."""
        stored = next(self._stored, None)
        if stored is not None:
            return stored
        self.start()
        task = await self._queue.get()
        if isinstance(task, TrinityError):
            raise task
        if task is None:
            self._queue.put_nowait(None)
        elif self._feed is not None:
            self._feed.acknowledge.remote(1)
        return task

    def start(self) -> None:
        """Begins reading, if there is anything left to read."""
        if self._thread is not None:
            return
        if TasksProgress.load(self.store.progress(self.key)).exhausted:
            self._queue.put_nowait(None)
            return
        self._feed = ray.remote(num_cpus=0)(CreditLimiter).remote(max(self.window, CHUNK_ROWS))
        self._thread = threading.Thread(target=self._run, name="task-stream", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        if self._feed is not None:
            await self._feed.close.remote()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 10)

    @property
    def _named(self) -> str:
        return f"the task stream of stage {self.spec.stage!r}"

    def _crashed(self, error: BaseException) -> OperatorError:
        """The worker ended, or Ray failed in another way: told with the operator that was at work."""
        try:
            what, seconds = ray.get(self._feed.doing.remote(), timeout=10)
        except RayError:  # the feed is gone as well
            what, seconds = "", 0.0
        if not what:
            return OperatorError(f"{self._named} failed: {_root_cause(error)}")
        limit = self.spec.operator_timeout
        if seconds >= limit:
            return OperatorError(f"{self._named}: {what}, did not end within `operator_timeout`, {limit:g} s")
        return OperatorError(f"{self._named}: {what}, ended its process or was killed: {_root_cause(error)}")

    def _run(self) -> None:
        try:
            rows_read = self._consume()
            self.store.commit(Commit(progress={self.key: TasksProgress(rows_read, exhausted=True).dump()}))
            self._put(None)
        except _Closed:
            self._put(None)
        except TrinityError as error:
            self._put(error)
        except Exception as error:  # the boundary to Ray Data, which wraps what its workers raise
            self._put(self._crashed(error))

    def _consume(self) -> int:
        rows_read = TasksProgress.load(self.store.progress(self.key)).rows_read
        # Ray Data takes seconds to import, which would be seconds before anything else starts
        from trinity_operators.task_execution import execute

        for block in execute(self._from_row(rows_read), self._feed):
            for chunk in block.to_pylist():
                if chunk["error"]:
                    raise OperatorError(f"{self._named}: {chunk['error']}")
                tables = {name: from_bytes(chunk[name]) for name in ("tasks", "decisions", "operators")}
                rows_read += tables["tasks"].num_rows
                progress = {self.key: TasksProgress(rows_read).dump()}
                self.store.commit(Commit(tables=tables, progress=progress))
                self._hand_out(tables)
        if ray.get(self._feed.is_closed.remote()):
            raise _Closed
        return rows_read

    def _hand_out(self, tables: dict[str, pa.Table]) -> None:
        for count in tables["operators"].to_pylist():
            self.status.count_operator(count["operator"], count["rows_in"], count["rows_out"])
        kept = tables["tasks"].filter(tables["tasks"]["kept"])
        self._feed.acknowledge.remote(tables["tasks"].num_rows - kept.num_rows)
        for task in tasks_from_table(kept):
            self._put(task)

    def _from_row(self, first_row: int) -> StreamSpec:
        if not first_row:
            return self.spec
        columns = ["taskset", "position", "dropped_by"]
        rows = self.store.table("tasks", columns=columns, stage=self.spec.stage)
        rows = rows.filter(pc.equal(rows["taskset"], self.spec.taskset.name)).sort_by("position")
        seen = pa.table({"dropped_by": rows["dropped_by"].dictionary_encode()})
        return replace(self.spec, first_row=first_row, seen=to_bytes(seen))

    def _put(self, item: Task | TrinityError | None) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)


class _Closed(Exception):
    """The stage ended before the task set did."""


def _stored_tasks(store: Store, spec: StreamSpec) -> list[Task]:
    """Tasks that an earlier session read, without those its operators dropped."""
    rows = store.table("tasks", stage=spec.stage)
    rows = rows.filter(pc.and_(pc.equal(rows["taskset"], spec.taskset.name), rows["kept"]))
    return tasks_from_table(rows.sort_by("position"))


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"
