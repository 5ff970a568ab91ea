"""The task pipeline: a task set on its way through the task operators, in one Ray Data execution
that lasts as long as it is needed.

The reader takes credit before every chunk, so that the stream is never more than a window ahead of the
explorer. Every row comes out with what the operators decided; the store gets the row and the decisions in one
commit.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.exceptions import RayError

from trinity_data.config import TaskPipelineConfig, TasksetConfig
from trinity_data.dataset.reader import DatasetSpec, Source, row_order
from trinity_data.dataset.task import Task, TaskRows, tasks_from_table
from trinity_data.errors import ConfigError, OperatorError, TrinityError
from trinity_data.processes import end_with_raylet
from trinity_data.schema import values_of
from trinity_data.status import Status
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_operators.base import Operator
from trinity_operators.registry import build_operators, declare_operators
from trinity_operators.runner import prepared
from trinity_operators.state_replay import replay_state, stateful_part
from trinity_operators.task_filtering import (
    CHUNK_ROWS,
    TaskReader,
    chunk_bounds,
    filter_tasks,
    needs_whole_set,
)

TABLES = ("tasks", "decisions", "operators")


@dataclass(frozen=True)
class StreamSpec:
    """What a Ray worker needs to read and filter the task set from `first_row` of its order."""

    taskset: TasksetConfig
    source: DatasetSpec
    pipeline: TaskPipelineConfig
    base_dir: Path
    """The folder of the pipeline file."""
    stage: str
    seed: int
    first_row: int = 0
    seen: bytes | None = None
    """For operators that keep state: what dropped each row before `first_row`, as Arrow bytes."""

    def open_reader(self) -> TaskReader:
        """Raises ConfigError for a set without rows or without a column that is read."""
        source = Source(self.source)
        order = row_order(source.num_rows, shuffle=self.taskset.shuffle, seed=self.seed)
        reader = TaskReader(self.taskset, source, order, stage=self.stage)
        if not source.num_rows:
            raise ConfigError(f"{source.name}: split {self.source.split!r} has no rows")
        return reader


class CreditLimiter:
    """A Ray actor. Credit for the reader: rows read, less rows that the explorer has taken or the operators
    dropped. It also knows which operator is at work, should the worker's process end.
    """

    def __init__(self, window: int) -> None:
        end_with_raylet()
        self.window, self.num_read, self.num_acknowledged, self.closed = window, 0, 0, False
        self.operator_at_work, self.since = "", time.monotonic()
        self.changed = asyncio.Condition()

    async def take(self, num_rows: int) -> bool:
        """Waits until the rows fit into the window; False once the stream is closed."""
        async with self.changed:
            await self.changed.wait_for(
                lambda: (
                    self.closed
                    or self.num_read == self.num_acknowledged
                    or self.num_read - self.num_acknowledged + num_rows <= self.window
                )
            )
            self.num_read += num_rows
            return not self.closed

    async def acknowledge(self, num_rows: int) -> None:
        async with self.changed:
            self.num_acknowledged += num_rows
            self.changed.notify_all()

    async def close(self) -> None:
        async with self.changed:
            self.closed = True
            self.changed.notify_all()

    async def is_closed(self) -> bool:
        return self.closed

    async def begin(self, operator: str) -> None:
        """An operator begins; empty when none is at work."""
        self.operator_at_work, self.since = operator, time.monotonic()

    async def at_work(self) -> tuple[str, float]:
        """The operator at work, or "", and for how many seconds."""
        return self.operator_at_work, time.monotonic() - self.since


class TaskStream:
    """Kept tasks in their order: those the store has, then those the stream brings. Closed with the stage."""

    def __init__(self, spec: StreamSpec, store: Store, *, window: int, status: Status) -> None:
        self.spec, self.store, self.window, self.status = spec, store, window, status
        self.key = f"tasks/{spec.stage}/{spec.taskset.name}"
        self._queue: asyncio.Queue[Task | TrinityError | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._limiter: Any = None
        self._thread: threading.Thread | None = None
        self._stored = iter(stored_tasks(store, spec))

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
        elif self._limiter is not None:
            self._limiter.acknowledge.remote(1)
        return task

    def start(self) -> None:
        """Begins reading, if there are rows that were not read yet."""
        if self._thread is not None:
            return
        if (self.store.progress(self.key) or {}).get("exhausted"):
            self._queue.put_nowait(None)
            return
        self._limiter = ray.remote(num_cpus=0)(CreditLimiter).remote(max(self.window, CHUNK_ROWS))
        self._thread = threading.Thread(target=self._run, name="task-stream", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        if self._limiter is not None:
            await self._limiter.close.remote()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 10)

    def _run(self) -> None:
        """The thread that reads."""
        name = f"the task stream of stage {self.spec.stage!r}"
        try:
            rows_read = int((self.store.progress(self.key) or {}).get("rows_read", 0))
            for chunk in run_on_ray_data(self._spec_from(rows_read), self._limiter):
                if chunk["error"]:
                    raise OperatorError(f"{name}: {chunk['error']}")
                rows_read = self._store_chunk(
                    {table: from_bytes(chunk[table]) for table in TABLES}, rows_read
                )
            if not ray.get(self._limiter.is_closed.remote()):
                self.store.commit(Commit(progress={self.key: {"rows_read": rows_read, "exhausted": True}}))
            self._put(None)
        except TrinityError as error:
            self._put(error)
        except Exception as error:  # the boundary to Ray Data, which wraps what its workers raise
            self._put(OperatorError(f"{name}{self._crash(error)}"))

    def _store_chunk(self, tables: dict[str, pa.Table], rows_read: int) -> int:
        """Commits a chunk and passes its kept tasks on. Returns the number of rows read after it."""
        rows_read += tables["tasks"]["parent"].null_count
        self.store.commit(Commit(tables=tables, progress={self.key: {"rows_read": rows_read}}))
        for count in tables["operators"].to_pylist():
            self.status.count_operator(count["operator"], count["rows_in"], count["rows_out"])
        kept = tables["tasks"].filter(tables["tasks"]["kept"])
        self._limiter.acknowledge.remote(tables["tasks"]["parent"].null_count - kept.num_rows)
        for task in tasks_from_table(kept):
            self._put(task)
        return rows_read

    def _spec_from(self, first_row: int) -> StreamSpec:
        if not first_row:
            return self.spec
        columns = ["taskset", "position", "dropped_by", "parent"]
        rows = self.store.table("tasks", columns=columns, stage=self.spec.stage)
        of_taskset = pc.equal(rows["taskset"], pa.scalar(self.spec.taskset.name))
        read = pc.and_(of_taskset, pc.is_null(rows["parent"]))
        rows = rows.filter(read).sort_by("position")
        seen = pa.table({"dropped_by": rows["dropped_by"].dictionary_encode()})
        return replace(self.spec, first_row=first_row, seen=to_bytes(seen))

    def _crash(self, error: BaseException) -> str:
        """The worker ended, or Ray failed in another way: the operator that was at work, and the cause."""
        try:
            operator, seconds = ray.get(self._limiter.at_work.remote(), timeout=10)
        except RayError:  # the limiter is gone as well
            operator, seconds = "", 0.0
        while error.__cause__ is not None:
            error = error.__cause__
        cause = f"{type(error).__name__}: {error}"
        limit = self.spec.pipeline.operator_timeout
        if not operator:
            return f" failed: {cause}"
        if seconds >= limit:
            return f": {operator}, did not end within `operator_timeout`, {limit:g} s"
        return f": {operator}, ended its process or was killed: {cause}"

    def _put(self, item: Task | TrinityError | None) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)


def stored_tasks(store: Store, spec: StreamSpec) -> list[Task]:
    """Tasks that an earlier session read, without those its operators dropped."""
    rows = store.table("tasks", stage=spec.stage)
    of_taskset = pc.equal(rows["taskset"], pa.scalar(spec.taskset.name))
    rows = rows.filter(pc.and_(of_taskset, rows["kept"]))
    return tasks_from_table(rows.sort_by("position"))


def run_on_ray_data(spec: StreamSpec, limiter: Any) -> Iterator[dict[str, Any]]:
    """Chunks as the limiter allows: one task reads, one runs the operators.

    A chunk holds the `TABLES` as Arrow bytes, and an error in words instead of them.
    """
    # Ray Data takes seconds to import, which would be seconds before anything else starts
    import ray.data
    from ray.data.block import BlockMetadata
    from ray.data.datasource import Datasource, ReadTask
    from ray.util.annotations import RayDeprecationWarning

    class TaskSource(Datasource):  # type: ignore[misc]
        """One read task."""

        def estimate_inmemory_data_size(self) -> None:
            return None

        def get_read_tasks(self, *_: Any, **__: Any) -> list[ReadTask]:
            metadata = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
            return [ReadTask(lambda: _read_chunks(spec, limiter), metadata)]

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    # with Ray's default, chunks would be held back until 128 MiB of them have come together
    context.target_max_block_size = 1
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    # Ray would start a worker that ends again and again without limit; a resume starts it in order
    once = {"max_retries": 0}
    with warnings.catch_warnings():
        # neither has a parameter of its own for retries
        warnings.simplefilter("ignore", RayDeprecationWarning)
        rows = ray.data.read_datasource(TaskSource(), override_num_blocks=1, ray_remote_args=once)
        worker = _OperatorWorker(spec, limiter)
        stream = rows.map_batches(worker, batch_format="pyarrow", batch_size=None, **once)
    for block in stream.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        yield from block.to_pylist()


def _read_chunks(spec: StreamSpec, limiter: Any) -> Iterator[pa.Table]:
    """What runs in the read task."""
    try:
        reader = spec.open_reader()
        operators, _ = declare_operators(spec.pipeline.operators, spec.base_dir)
        bounds = chunk_bounds(spec.first_row, len(reader.order), whole_set=needs_whole_set(operators))
        for start, end in bounds:
            if not ray.get(limiter.take.remote(end - start)):
                return
            yield _chunk(rows=reader.rows(start, end).to_table())
    except Exception as error:  # the boundary to the files of a task set
        yield _chunk(
            error=str(error) if isinstance(error, TrinityError) else f"{type(error).__name__}: {error}"
        )


class _OperatorWorker:
    """Runs the operators on a chunk in the worker.

    An error travels as data, since Ray would bury it in its own.
    """

    def __init__(self, spec: StreamSpec, limiter: Any) -> None:
        self.spec, self.limiter = spec, limiter
        self.operators: list[Operator] | None = None
        self.prepared = ExitStack()

    def __call__(self, block: pa.Table) -> pa.Table:
        return pa.concat_tables([self._filter(row["rows"], row["error"]) for row in block.to_pylist()])

    def _filter(self, rows: bytes, error: str) -> pa.Table:
        if error:
            return _chunk(error=error)
        try:
            if self.operators is None:
                self.operators = build_operators(self.spec.pipeline.operators, self.spec.base_dir)
                # until the worker ends: nobody tells it which block was the last
                self.prepared.enter_context(prepared(self.operators, self._begin))
                self._replay_state(self.operators)
            filtered = filter_tasks(
                self.operators,
                TaskRows.from_table(from_bytes(rows)),
                stage=self.spec.stage,
                watch=self._begin,
            )
        except TrinityError as raised:
            return _chunk(error=str(raised))
        self._begin("")
        return _chunk(tasks=filtered.tasks, decisions=filtered.decisions, operators=filtered.operators)

    def _replay_state(self, operators: Sequence[Operator]) -> None:
        """Shows operators that keep state the rows of the sessions before, chunk by chunk as then."""
        if self.spec.seen is None or not stateful_part(operators):
            return
        reader, dropped_by = self.spec.open_reader(), values_of(from_bytes(self.spec.seen)["dropped_by"])
        for start, end in chunk_bounds(0, self.spec.first_row, whole_set=needs_whole_set(operators)):
            rows = reader.rows(start, end)
            usable = [
                by for by, reason in zip(dropped_by[start:end], rows.reasons, strict=False) if not reason
            ]
            replay_state(
                operators, rows.for_operators(), usable,
                row_kind="task", stage=self.spec.stage, watch=self._begin,
            )  # fmt: skip

    def _begin(self, operator: str) -> None:
        """Reported before the operator runs, since it may be the last that this process does:
        the kernel ends it when time is up.

        No thread of ours could, while an operator holds Python's lock.
        """
        ray.get(self.limiter.begin.remote(operator))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, self.spec.pipeline.operator_timeout if operator else 0)


def _chunk(*, error: str = "", **tables: pa.Table) -> pa.Table:
    """A chunk on its way through Ray Data: one row of Arrow bytes, because Ray Data would divide it into
    rows otherwise.
    """
    columns = {
        name: pa.array([to_bytes(tables[name]) if name in tables else b""], pa.binary())
        for name in ("rows", *TABLES)
    }
    return pa.table(columns | {"error": [error]})


def to_bytes(table: pa.Table) -> bytes:
    """The table as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def from_bytes(data: bytes) -> pa.Table:
    return pa.ipc.open_stream(data).read_all()
