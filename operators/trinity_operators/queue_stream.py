"""The tasks of a queue on their way through the task operators, as they are pushed.

In the run's own process, because a queue holds no more than people or programs push while it goes on.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trinity_data.config import TaskPipelineConfig, TasksetConfig
from trinity_data.dataset.row import Row
from trinity_data.dataset.task import Task, TaskRows, build_task_rows, tasks_from_table
from trinity_data.dataset.task_queue import TaskQueue
from trinity_data.dataset.text_files import JsonRows
from trinity_data.errors import OperatorError, TrinityError
from trinity_data.progress import TasksProgress, tasks_key
from trinity_data.schema import values_of
from trinity_data.status import Status
from trinity_data.store.protocol import WritableStore
from trinity_data.store.types import Commit
from trinity_operators.base import Operator
from trinity_operators.preparation import prepared
from trinity_operators.registry import build_operators
from trinity_operators.saved_state import encoded, load_states
from trinity_operators.state_replay import replay_state, stateful_part
from trinity_operators.task_engines import TaskEngines, connect_engines
from trinity_operators.task_filtering import chunk_bounds, filter_tasks, no_whole_set
from trinity_operators.task_pipeline import store_filtered, stored_rows, stored_tasks, task_states

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class QueueSpec:
    """A queue and the operators behind it."""

    taskset: TasksetConfig
    folder: Path
    pipeline: TaskPipelineConfig
    base_dir: Path
    """The folder of the pipeline file."""
    stage: str


class QueueStream:
    """Kept tasks in the order of the queue: those the store has, then those that are pushed.

    A chunk never spans two pushes, so that chunks are the same in every session.
    """

    def __init__(
        self, spec: QueueSpec, store: WritableStore, *, status: Status, engines: TaskEngines | None = None
    ) -> None:
        """`engines` are for operators that ask them."""
        self.spec, self.store, self.status, self.engines = spec, store, status, engines
        self.key = tasks_key(spec.stage, spec.taskset.name)
        self.rows_stored = TasksProgress.load(store.progress(self.key)).rows_read
        self._queue: asyncio.Queue[Task | TrinityError | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    async def next(self) -> Task | None:
        """Waits for the next task that no operator dropped; None once the queue has ended."""
        self.start()
        item = await self._queue.get()
        if isinstance(item, TrinityError):
            raise item
        if item is None:
            self._queue.put_nowait(None)
        return item

    def start(self) -> None:
        """Begins reading."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="queue-stream", daemon=True)
            self._thread.start()

    async def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 10)

    def _run(self) -> None:
        """The thread that reads."""
        try:
            self._put(stored_tasks(self.store, self.spec))
            operators = build_operators(self.spec.pipeline.operators, self.spec.base_dir)
            if problem := no_whole_set(self.spec.taskset, operators):
                raise OperatorError(problem)
            connect_engines(operators, self.engines, self.spec.taskset)
            with prepared(operators):
                self._read(operators)
            if not self._closed.is_set():
                progress = TasksProgress(self.rows_stored, exhausted=True).dump()
                self.store.commit(Commit(progress={self.key: progress}))
                self._put([None])
        except TrinityError as error:
            self._put([error])
        except OSError as error:
            self._put([OperatorError(f"{self.spec.folder}: {error}")])

    def _read(self, operators: Sequence[Operator]) -> None:
        """Chunk by chunk, until the queue or the stage ends."""
        dropped_by, stage = list[str](), self.spec.stage
        states = task_states(operators, self.spec)
        if (saved := states.read(self.store, self.rows_stored)) is not None:
            load_states(operators, saved)
        elif self.rows_stored and stateful_part(operators):
            dropped_by = values_of(stored_rows(self.store, self.spec)["dropped_by"])
        for first, rows in self._chunks():
            if first < self.rows_stored:
                if dropped_by:
                    built, by = self._built(first, rows), dropped_by[first : first + len(rows)]
                    usable = [each for each, reason in zip(by, built.reasons, strict=True) if not reason]
                    replay_state(operators, built.for_operators(), usable, row_kind="task", stage=stage)
                continue
            filtered = filter_tasks(operators, self._built(first, rows), stage=stage)
            self.rows_stored = first + len(rows)
            encoded_states = {position: encoded(each) for position, each in states.saving.items()}
            progress = {self.key: TasksProgress(self.rows_stored).dump()}
            progress |= states.of_commit(encoded_states, len(rows))
            kept = store_filtered(self.store, self.status, filtered, progress)
            self._put(tasks_from_table(kept))

    def _chunks(self) -> Iterator[tuple[int, list[Row]]]:
        """Rows with the number of the first of them; waits for pushes."""
        queue, first, number = TaskQueue(self.spec.folder), 0, 1
        while not self._closed.is_set():
            file = queue.file(number)
            if not file.exists():
                self._closed.wait(POLL_SECONDS)
                continue
            if not file.stat().st_size:
                return
            rows = JsonRows([file], skip_bad_rows=self.spec.taskset.on_bad_row == "skip")
            for start, end in chunk_bounds(0, len(rows)):
                yield first + start, [rows[place] for place in range(start, end)]
            first, number = first + len(rows), number + 1

    def _built(self, first: int, rows: Sequence[Row]) -> TaskRows:
        return build_task_rows(
            self.spec.taskset,
            rows,
            stage=self.spec.stage,
            source=str(self.spec.folder),
            source_rows=range(first, first + len(rows)),
            first_position=first,
        )

    def _put(self, items: Sequence[Task | TrinityError | None]) -> None:
        if not self._loop.is_closed():
            for item in items:
                self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
