"""The task set on its way through the task operators, as one Ray Data execution that lasts as long as it is needed.

The reader asks a feed for credit before every chunk, so that the stream is never more than a window ahead of the
explorer. Every row comes out with what the operators said of it; the store gets the row and the decisions in one commit.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray
import ray.data
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from trinity_data.config import TasksetConfig
from trinity_data.errors import OperatorError, TrinityError
from trinity_data.pipeline.operator import Operator
from trinity_data.pipeline.registry import OperatorSpec, build_operators
from trinity_data.pipeline.runner import Result, counts_table, run_operators, scores_column
from trinity_data.pipeline.source import Source, SourceSpec, chunks, row_order
from trinity_data.pipeline.task import Task, build_task_rows, task_columns, tasks_from_table
from trinity_data.schema import TABLES
from trinity_data.status import Status
from trinity_data.store.commit import Commit
from trinity_data.store.store import Store

log = logging.getLogger(__name__)

CHUNK_ROWS = 64


@dataclass(frozen=True)
class StreamSpec:
    """What a Ray worker needs to read and filter the task set from `first_row` of its order."""

    taskset: TasksetConfig
    source: SourceSpec
    operators: Sequence[OperatorSpec]
    stage: str
    seed: int
    first_row: int = 0
    seen: bytes | None = None
    """The `tasks` rows before `first_row`, as an Arrow stream, for operators that keep state."""


class Feed:
    """Credit for the reader: rows asked for, less rows the explorer has taken or the operators dropped."""

    def __init__(self, window: int) -> None:
        self.window, self.out, self.acknowledged, self.closed = window, 0, 0, False
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


class _TaskSource(Datasource):  # type: ignore[misc]
    """One read task that reads chunk by chunk, as the feed allows."""

    def __init__(self, spec: StreamSpec, feed: Any) -> None:
        super().__init__()
        self.spec, self.feed = spec, feed

    def estimate_inmemory_data_size(self) -> None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, **_: Any
    ) -> list[ReadTask]:
        spec, feed = self.spec, self.feed

        def read() -> Iterator[pa.Table]:
            try:
                for rows in _read(spec, feed):
                    yield _chunk(rows=_to_bytes(rows))
            except Exception as error:  # the boundary to the files of a task set
                yield _chunk(error=_said(error))

        metadata = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(read, metadata)]


def _read(spec: StreamSpec, feed: Any) -> Iterator[pa.Table]:
    source = Source(spec.source)
    order = row_order(source.num_rows, shuffle=spec.taskset.shuffle, seed=spec.seed)
    position = spec.first_row
    for numbers in chunks(order[spec.first_row :], CHUNK_ROWS):
        if not ray.get(feed.ask.remote(len(numbers))):
            return
        yield build_task_rows(
            spec.taskset,
            source.take(numbers),
            stage=spec.stage,
            source=source.name,
            source_rows=numbers,
            first_position=position,
        )
        position += len(numbers)


PARTS = ("rows", "tasks", "decisions", "operators")


def _chunk(*, error: str = "", **parts: bytes) -> pa.Table:
    """A chunk on its way through Ray Data: one row of Arrow bytes, because Ray Data would cut it into rows otherwise."""
    columns = {name: pa.array([parts.get(name, b"")], pa.binary()) for name in PARTS}
    return pa.table(columns | {"error": [error]})


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, TrinityError) else f"{type(error).__name__}: {error}"


class _Judge:
    """Runs the operators on a chunk in the worker. An error travels as data, since Ray would bury it in its own."""

    def __init__(self, spec: StreamSpec) -> None:
        self.spec = spec
        self.operators: list[Operator] | None = None

    def __call__(self, block: pa.Table) -> pa.Table:
        return pa.concat_tables(
            [
                _chunk(error=row["error"]) if row["error"] else self._try(row["rows"])
                for row in block.to_pylist()
            ]
        )

    def _try(self, packed: bytes) -> pa.Table:
        try:
            return self._judge(_from_bytes(packed))
        except TrinityError as error:
            return _chunk(error=_said(error))

    def _judge(self, rows: pa.Table) -> pa.Table:
        if self.operators is None:
            self.operators = build_operators(self.spec.operators)
            self._remember()
        result = run_operators(
            self.operators, rows, row_kind="task", id_column="task_id", stage=self.spec.stage, step=None
        )
        tasks = _as_left(task_columns(rows), result)
        counts = counts_table(result.counts, pipeline="task", stage=self.spec.stage, step=None)
        return _chunk(
            tasks=_to_bytes(tasks.cast(TABLES["tasks"])),
            decisions=_to_bytes(result.decisions),
            operators=_to_bytes(counts),
        )

    def _remember(self) -> None:
        """Gives operators that keep state the rows of the session before."""
        if self.spec.seen is None:
            return
        for operator in self.operators or ():
            if operator.keeps_state and hasattr(operator, "remember"):
                operator.remember(_from_bytes(self.spec.seen))


class TaskStream:
    """Kept tasks in their order: those the store has, then those the stream brings. Closed with the stage."""

    def __init__(self, spec: StreamSpec, store: Store, *, window: int, status: Status) -> None:
        self.spec, self.store, self.window, self.status = spec, store, window, status
        self.key = f"tasks/{spec.stage}/{spec.taskset.name}"
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
        if (self.store.progress(self.key) or {}).get("exhausted"):
            self._queue.put_nowait(None)
            return
        self._feed = ray.remote(num_cpus=0)(Feed).remote(max(self.window, CHUNK_ROWS))
        self._thread = threading.Thread(target=self._run, name="task-stream", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        if self._feed is not None:
            await self._feed.close.remote()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 10)

    def _run(self) -> None:
        try:
            rows_read = self._consume()
            self.store.commit(Commit(progress={self.key: {"rows_read": rows_read, "exhausted": True}}))
            self._put(None)
        except _Closed:
            self._put(None)
        except TrinityError as error:
            self._put(error)
        except Exception as error:  # the boundary to Ray Data, which wraps what its workers raise
            self._put(
                OperatorError(f"the task stream of stage {self.spec.stage!r} failed: {_root_cause(error)}")
            )

    def _consume(self) -> int:
        rows_read = int((self.store.progress(self.key) or {}).get("rows_read", 0))
        for block in _execute(self._from_row(rows_read), self._feed):
            for chunk in block.to_pylist():
                if chunk["error"]:
                    raise OperatorError(f"the task stream of stage {self.spec.stage!r}: {chunk['error']}")
                tables = {name: _from_bytes(chunk[name]) for name in ("tasks", "decisions", "operators")}
                rows_read += tables["tasks"].num_rows
                self.store.commit(Commit(tables=tables, progress={self.key: {"rows_read": rows_read}}))
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
        seen = task_columns(self.store.table("tasks", stage=self.spec.stage))
        return replace(self.spec, first_row=first_row, seen=_to_bytes(seen))

    def _put(self, item: Task | TrinityError | None) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)


class _Closed(Exception):
    """The stage ended before the task set did."""


def _execute(spec: StreamSpec, feed: Any) -> Iterator[pa.Table]:
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    # with Ray's default, chunks would be held back until 128 MiB of them have come together
    context.target_max_block_size = 1
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    stream = ray.data.read_datasource(_TaskSource(spec, feed), override_num_blocks=1).map_batches(
        _Judge(spec), batch_format="pyarrow", batch_size=None
    )
    yield from stream.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)


def _stored_tasks(store: Store, spec: StreamSpec) -> list[Task]:
    """Tasks that an earlier session read, without those its operators dropped."""
    rows = store.table("tasks", stage=spec.stage)
    rows = rows.filter(pc.and_(pc.equal(rows["taskset"], spec.taskset.name), rows["kept"]))
    return tasks_from_table(rows.sort_by("position"))


def _as_left(rows: pa.Table, result: Result) -> pa.Table:
    """The rows of the `tasks` table as the operators left them; a new prompt is the last message too."""
    rows = _replace(rows, "scores", scores_column(result))
    rows = _replace(rows, "kept", pa.array(result.kept))
    rows = _replace(rows, "dropped_by", result.dropped_by)
    before = rows["prompt"].to_pylist()
    prompts = list(before)
    for number, prompt in zip(
        np.flatnonzero(result.kept), result.survivors["prompt"].to_pylist(), strict=True
    ):
        prompts[number] = prompt
    if prompts == before:
        return rows
    messages = [
        [*said[:-1], said[-1] | {"content": prompt}] if said else said
        for said, prompt in zip(rows["messages"].to_pylist(), prompts, strict=True)
    ]
    rows = _replace(rows, "messages", pa.array(messages, TABLES["tasks"].field("messages").type))
    return _replace(rows, "prompt", pa.array(prompts))


def _replace(rows: pa.Table, name: str, column: pa.Array) -> pa.Table:
    field = TABLES["tasks"].field(name)
    return rows.set_column(rows.schema.get_field_index(name), field, column.cast(field.type))


def _to_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def _from_bytes(data: bytes) -> pa.Table:
    return pa.ipc.open_stream(data).read_all()


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"
