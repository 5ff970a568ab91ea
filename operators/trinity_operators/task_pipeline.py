"""The task pipeline: a task set on its way through the task operators to the explorer.

The store gets every row, what the operators decided about it and the stream's position in one commit. The
stream is never more than a window ahead of the explorer.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from trinity_data.config import TaskPipelineConfig, TasksetConfig
from trinity_data.dataset.task import Task, tasks_from_table
from trinity_data.errors import OperatorError, TrinityError
from trinity_data.progress import TasksProgress, tasks_key
from trinity_data.restart_log import RestartLog
from trinity_data.restarts import RestartLimit
from trinity_data.schema import values_of
from trinity_data.status import Status
from trinity_data.store.protocol import WritableStore
from trinity_data.store.types import Commit
from trinity_operators.at_work import TIMED_OUT
from trinity_operators.base import Operator
from trinity_operators.counts import show_counts
from trinity_operators.ray_chunks import RayChunks
from trinity_operators.registry import declare_operators
from trinity_operators.saved_state import TASKS, SavedStates
from trinity_operators.state_replay import stateful_part
from trinity_operators.task_chunks import Chunk, ChunkSource, InProcessChunks, StreamSpec, window_of
from trinity_operators.task_engines import TaskEngines, first_asking
from trinity_operators.task_execution import Execution, operator_parts_of, plan_execution
from trinity_operators.task_filtering import FilteredTasks, no_whole_set
from trinity_operators.task_hand_over import MovingChunks, workers_at_hand
from trinity_operators.task_window import Window

log = logging.getLogger(__name__)

Item: TypeAlias = tuple[int | None, Task] | TrinityError | None
"""A task, with its position where it was not stored before; a failure; or the end of the set."""


class TaskStream:
    """Kept tasks in their order: those the store has, then those the stream brings. Closed with the stage."""

    def __init__(
        self,
        spec: StreamSpec,
        store: WritableStore,
        *,
        window: int,
        status: Status,
        engines: TaskEngines | None = None,
        write_taskset: Callable[[], object] | None = None,
        max_restarts: int = 0,
    ) -> None:
        """`engines` are for operators that ask them. `write_taskset` makes the files of the task set, where
        no earlier session has read any of it. Where a worker ends by itself, the stream begins again behind
        the rows that are stored, at most `max_restarts` times an hour.
        """
        self.restarts, self.restart_log = RestartLimit(max_restarts), RestartLog(store, status, kind="stream")
        self.engines, self.write_taskset = engines, write_taskset
        self.spec, self.store, self.window, self.status = spec, store, window, status
        self.key = tasks_key(spec.stage, spec.taskset.name)
        self._queue: asyncio.Queue[Item] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._chunks: ChunkSource | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._positions = deque[int]()
        """Of tasks that wait for the explorer."""
        self._rows_stored = 0
        self._acknowledged: int | None = None
        """By the explorer, in this session."""
        self._asked = asyncio.Event()

    async def next(self) -> Task | None:
        """The next task that no operator dropped, or None at the end of the set."""
        self.start()
        item = await self._next_item()
        if isinstance(item, TrinityError):
            raise item
        if item is None:
            self._queue.put_nowait(None)
            return None
        position, task = item
        if position is not None:
            self._positions.popleft()
            self._acknowledge()
        return task

    def start(self) -> None:
        """Begins reading: what is stored, then the rows that were not read yet."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="task-stream", daemon=True)
            self._thread.start()

    async def asked(self) -> None:
        """Waits until the operators will ask for rollouts no more, or the stream failed; the explorer need
        not have taken any task.
        """
        await self._asked.wait()

    async def close(self) -> None:
        self._closed.set()
        if self._chunks is not None:
            self._chunks.close()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 10)

    async def _next_item(self) -> Item:
        """Raises OperatorError where an operator in this process takes longer than its time."""
        if not self._queue.empty():
            # a task of asyncio and a wait for each row cost more than the cheap operators
            return self._queue.get_nowait()
        limit = self.spec.pipeline.operator_timeout
        item = asyncio.ensure_future(self._queue.get())
        try:
            while not item.done():
                operator, seconds = self._chunks.at_work() if self._chunks else ("", 0.0)
                if operator and seconds >= limit:
                    raise OperatorError(f"{self._name}: {operator}, {TIMED_OUT}, {limit:g} s")
                await asyncio.wait({item}, timeout=limit - seconds if operator else limit)
            return item.result()
        finally:
            item.cancel()

    @property
    def _name(self) -> str:
        return f"the task stream of stage {self.spec.stage!r}"

    def _run(self) -> None:
        """The thread that stores what the operators leave."""
        try:
            progress = TasksProgress.load(self.store.progress(self.key))
            self._in_loop(partial(self._pass_on_stored, stored_tasks(self.store, self.spec)))
            if progress.exhausted:
                self._put(None)
                return
            rows_read = self._rows_stored = progress.rows_read
            if self.write_taskset is not None:
                if not rows_read:
                    self.write_taskset()
                self._in_loop(self._asked.set)
            while death := self._read():
                self._wait_for_a_restart(death)
            if not self._closed.is_set():
                rows_read = TasksProgress.load(self.store.progress(self.key)).rows_read
                exhausted = TasksProgress(rows_read, exhausted=True).dump()
                self.store.commit(Commit(progress={self.key: exhausted}))
            self._put(None)
        except OperatorError as error:
            self._put(error)
        except TrinityError as error:
            self._put(OperatorError(f"{self._name}: {error}"))
        except Exception as error:  # the boundary to Ray, such as where it has ended
            self._put(OperatorError(f"{self._name} failed: {_root(error)}"))

    def _read(self) -> str:
        """From the first row that is not stored to the end; how a worker ended meanwhile, if one did.

        Raises TrinityError for what would come again.
        """
        rows_read = TasksProgress.load(self.store.progress(self.key)).rows_read
        try:
            self._chunks = self._open(rows_read)
            if self._closed.is_set():
                self._chunks.close()
            with closing(self._chunks.__iter__()) as chunks:
                for chunk in chunks:
                    if chunk.error:
                        crash = self._chunks.describe_crash() or chunk.error
                        return self._death(f"{self._name}: {crash}", chunk.worker_ended)
                    self._store(chunk)
        except TrinityError as error:
            if not _follows_a_death(error):
                raise
            failure = f"{self._name}: {error}"
        except Exception as error:  # the boundary to Ray Data, which wraps what its workers raise
            crash = self._chunks.describe_crash() if self._chunks else ""
            failure = f"{self._name}" + (f": {crash}" if crash else f" failed: {_root(error)}")
            if not _follows_a_death(error):
                raise OperatorError(failure) from error
        else:
            return ""
        finally:
            if self._chunks is not None:
                self._chunks.close()
        # behind the handlers, since an exception that refers to the Ray error would keep Ray Data's workers
        return self._death(failure, True)

    @staticmethod
    def _death(failure: str, worker_ended: bool) -> str:
        """The failure; raises it where it would come again: an operator's time, too, would pass again."""
        if not worker_ended or TIMED_OUT in failure:
            raise OperatorError(failure)
        return failure

    def _wait_for_a_restart(self, death: str) -> None:
        """Raises OperatorError above the limit."""
        if self._closed.is_set() or not self.restarts.max_per_hour:
            raise OperatorError(death)
        part = f"task stream {self.spec.taskset.name}"
        delay = self.restarts.next_delay()
        if delay is None:
            raise OperatorError(
                f"{death}; its workers were started again as often as cluster.max_restarts allows: "
                f"{self.restarts.max_per_hour} times an hour; the same command goes on behind the stored rows"
            )
        self.restart_log.died(part, death)
        self._closed.wait(delay)
        rows_read = TasksProgress.load(self.store.progress(self.key)).rows_read
        self.restart_log.restarted(part, f"behind {rows_read} stored rows")

    def _open(self, first_row: int) -> ChunkSource:
        spec = self.spec
        operators, problems = declare_operators(spec.pipeline.operators, spec.base_dir)
        for position, problem in problems:
            raise OperatorError(f"{self._name}: operators[{position}]: {problem}")
        self._states = task_states(operators, spec)
        if first_row:
            rows = stored_rows(self.store, spec)
            dropped_by = rows["dropped_by"].dictionary_encode()
            earlier = pa.table({"source_row": rows["source_row"], "dropped_by": dropped_by})
            states = self._states.read(self.store, first_row)
            spec = replace(spec, first_row=first_row, earlier=earlier, states=states)
        reader = spec.open_reader()
        num_rows = len(reader.order)
        if problem := no_whole_set(spec.taskset, operators):
            raise OperatorError(f"{self._name}: {problem}")
        if first_asking(operators, ()) is None:
            # what asks for no rollouts asks chunk by chunk, while the explorer takes tasks
            self._in_loop(self._asked.set)
        models = self.engines.model_names if self.engines is not None else ()
        execution = plan_execution(
            spec.pipeline, operators, spec.base_dir, streaming=spec.source.streaming, models=models
        )
        log.info("%s runs %s", self._name, execution)
        window = window_of(spec, operators, num_rows, num_rows=self.window, num_workers=execution.num_workers)
        if execution.where == "ray":
            return RayChunks(spec, execution, operators, window, self._acknowledged)
        in_process = InProcessChunks(spec, reader, Window(*window), self.engines)
        num_workers = workers_at_hand() if execution.may_move else 0
        return self._moving(in_process, operators, num_rows, num_workers) if num_workers > 1 else in_process

    def _moving(
        self, in_process: InProcessChunks, operators: list[Operator], num_rows: int, num_workers: int
    ) -> MovingChunks:
        """Chunks in process that may go on in workers."""

        def in_workers(row: int, acknowledged: int) -> ChunkSource:
            rest = replace(in_process.spec, first_row=row)
            window = window_of(rest, operators, num_rows, num_rows=self.window, num_workers=num_workers)
            execution = Execution("ray", "the operators cost more than workers", num_workers)
            return RayChunks(rest, execution, operators, window, acknowledged)

        return MovingChunks(self._name, in_process, in_workers, end_row=num_rows, num_workers=num_workers)

    def _store(self, chunk: Chunk) -> None:
        """Commits a chunk and passes its kept tasks on."""
        assert chunk.filtered is not None
        progress = {self.key: TasksProgress(chunk.end).dump()}
        states = self._states.of_commit(chunk.states, chunk.end - chunk.start)
        kept = store_filtered(self.store, self.status, chunk.filtered, progress | states)
        tasks = list(zip(values_of(kept["position"]), tasks_from_table(kept), strict=True))
        self._in_loop(partial(self._pass_on, tasks, chunk.end))

    def _pass_on_stored(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            self._queue.put_nowait((None, task))

    def _pass_on(self, tasks: Sequence[tuple[int, Task]], rows_stored: int) -> None:
        for position, task in tasks:
            self._positions.append(position)
            self._queue.put_nowait((position, task))
        self._rows_stored = rows_stored
        self._acknowledge()

    def _acknowledge(self) -> None:
        """Every row before the first task that waits was taken or dropped."""
        assert self._chunks is not None
        self._acknowledged = self._positions[0] if self._positions else self._rows_stored
        self._chunks.acknowledge(self._acknowledged)

    def _put(self, item: TrinityError | None) -> None:
        self._in_loop(partial(self._end, item))

    def _in_loop(self, call: Callable[[], object]) -> None:
        """Called from the thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)

    def _end(self, item: TrinityError | None) -> None:
        self._queue.put_nowait(item)
        self._asked.set()


def _root(error: BaseException) -> str:
    """The first cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def _follows_a_death(error: BaseException | None) -> bool:
    """Whether a process of Ray's has ended, or its node; what Ray's workers raise comes as RayTaskError."""
    while error is not None:
        if isinstance(error, RayError) and not isinstance(error, RayTaskError | GetTimeoutError):
            return True
        error = error.__cause__
    return False


class ReadTaskset(Protocol):
    """A task set that a stage reads."""

    @property
    def stage(self) -> str: ...
    @property
    def taskset(self) -> TasksetConfig: ...
    @property
    def pipeline(self) -> TaskPipelineConfig: ...
    @property
    def base_dir(self) -> Path: ...


def task_states(operators: Sequence[Operator], spec: ReadTaskset) -> SavedStates:
    """What the task operators, built from the pipeline of `spec`, save."""
    parts = [[name, args] for _, name, args in operator_parts_of(spec.pipeline.operators, spec.base_dir)]
    return SavedStates(
        operators,
        key=f"{TASKS}/{spec.stage}/{spec.taskset.name}",
        built_from=parts[: len(stateful_part(operators))],
    )


def store_filtered(
    store: WritableStore, status: Status, filtered: FilteredTasks, progress: Mapping[str, Any]
) -> pa.Table:
    """Commits what the operators made of rows, with how far the stream has come; returns the kept tasks."""
    store.commit(Commit(tables=filtered.tables, progress=progress))
    show_counts(status, filtered.operators)
    kept = filtered.tasks["kept"]
    return filtered.tasks if pc.all(kept).as_py() else filtered.tasks.filter(kept)


def stored_rows(store: WritableStore, spec: ReadTaskset) -> pa.Table:
    """Each row that an earlier session read, in their order: its number, and what dropped it, or ""."""
    columns = ["taskset", "position", "source_row", "dropped_by", "parent"]
    rows = store.table("tasks", columns=columns, stage=spec.stage)
    of_taskset = pc.equal(rows["taskset"], pa.scalar(spec.taskset.name))
    read = pc.and_(of_taskset, pc.is_null(rows["parent"]))
    return rows.filter(read).sort_by("position")


def stored_tasks(store: WritableStore, spec: ReadTaskset) -> list[Task]:
    """Tasks that an earlier session read, without those its operators dropped."""
    rows = store.table("tasks", stage=spec.stage)
    of_taskset = pc.equal(rows["taskset"], pa.scalar(spec.taskset.name))
    rows = rows.filter(pc.and_(of_taskset, rows["kept"]))
    return tasks_from_table(rows.sort_by("position"))
