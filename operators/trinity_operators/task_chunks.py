"""A task set chunk by chunk: which rows are read next, and what the operators make of them. The same in a
thread of the run and in a Ray worker.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from trinity_data.config import TaskPipelineConfig, TasksetConfig
from trinity_data.dataset.in_order import open_in_order
from trinity_data.dataset.reader import DatasetSpec
from trinity_data.errors import TrinityError
from trinity_data.schema import values_of
from trinity_operators.base import Operator
from trinity_operators.calls import Watch
from trinity_operators.preparation import prepared
from trinity_operators.registry import build_operators
from trinity_operators.remote_operators import RemoteOperator, taking_turns
from trinity_operators.saved_state import SavedState, encoded, load_states, saving
from trinity_operators.state_replay import replay_state, stateful_part
from trinity_operators.task_engines import TaskEngines, connect_engines
from trinity_operators.task_filtering import (
    CHUNK_ROWS,
    FilteredTasks,
    TaskReader,
    chunk_bounds,
    filter_tasks,
    joined,
    needs_whole_set,
)
from trinity_operators.task_window import Window


@dataclass(frozen=True)
class StreamSpec:
    """What a worker needs to read and filter the task set from `first_row` of its order."""

    taskset: TasksetConfig
    source: DatasetSpec
    pipeline: TaskPipelineConfig
    base_dir: Path
    """The folder of the pipeline file."""
    stage: str
    seed: int
    first_row: int = 0
    earlier: pa.Table | None = None
    """Of each row before `first_row`, as the store has them: `source_row` and `dropped_by`."""
    states: Mapping[int, Iterable[SavedState]] | None = None
    """By position what operators saved behind these rows; None where the rows are to be shown again."""

    @property
    def first_turn(self) -> int:
        """The number of the first chunk that operators see."""
        is_shown_again = self.earlier is not None and self.states is None
        return 0 if is_shown_again else turn_of(self.first_row)

    def open_reader(self) -> TaskReader:
        """Raises ConfigError for a set without rows or without a column that is read."""
        read = None if self.earlier is None else self.earlier["source_row"].to_numpy()
        source, order = open_in_order(self.source, shuffle=self.taskset.shuffle, seed=self.seed, read=read)
        return TaskReader(self.taskset, source, order, stage=self.stage)


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows as the operators left them, or in words why they could not."""

    start: int
    end: int
    filtered: FilteredTasks | None
    error: str = ""
    states: Mapping[int, SavedState] = field(default_factory=dict)
    """By position what operators save behind the rows."""
    worker_ended: bool = False
    """Whether the error is the end of a process."""


def turn_of(start: int) -> int:
    """The number of the chunk that begins there. The last one of a set that has grown since may be shorter,
    so that the next does not begin at a multiple.
    """
    return -(-start // CHUNK_ROWS)


class ChunkSource(Protocol):
    """Filtered chunks in the order of the rows, as far as the explorer has come."""

    def __iter__(self) -> Generator[Chunk]: ...

    def acknowledge(self, row: int) -> None:
        """Every row before `row` was taken by the explorer or dropped."""

    def at_work(self) -> tuple[str, float]:
        """The operator that this process is at, or "", and for how many seconds."""

    def describe_crash(self) -> str:
        """The operator at which a worker ended, and how; empty where none did."""

    def close(self) -> None:
        """Lets it end; once it has ended, ends what is left of it."""


def window_of(
    spec: StreamSpec, operators: Sequence[Operator], num_set_rows: int, *, num_rows: int, num_workers: int = 1
) -> tuple[int, int, int, int, int]:
    """Arguments of `Window`. With an operator of the whole set all rows are one chunk."""
    chunk_rows = max(num_set_rows - spec.first_row, 1) if needs_whole_set(operators) else CHUNK_ROWS
    return spec.first_row, num_set_rows, chunk_rows, max(num_rows, CHUNK_ROWS), num_workers


class ChunkWorker:
    """Reads rows and passes them through the operators, which are prepared."""

    def __init__(
        self, spec: StreamSpec, reader: TaskReader, operators: Sequence[Operator], watch: Watch
    ) -> None:
        self.spec, self.reader, self.operators, self.watch = spec, reader, operators, watch
        self.whole_set, self.saving = needs_whole_set(operators), saving(operators)

    def chunk(self, start: int, end: int) -> Chunk:
        """The rows from `start` on, at most up to `end`: a stream may end before.

        Raises OperatorError, and ConfigError for rows that cannot be read.
        """
        if start == self.spec.first_row:
            self._restore_state()
        parts, num_read = list[FilteredTasks](), 0
        for bounds in chunk_bounds(start, end, whole_set=self.whole_set):
            rows = self.reader.rows(*bounds)
            num_read += rows.tasks.num_rows
            if not rows.tasks.num_rows:
                break
            saved = self.saving if bounds[1] == end else ()
            with taking_turns(self.operators, turn_of(bounds[0]), saved=saved):
                parts.append(filter_tasks(self.operators, rows, stage=self.spec.stage, watch=self.watch))
            self.watch("")
            if start + num_read < bounds[1]:
                break
        if not parts:
            return Chunk(start, start, None)
        return Chunk(start, start + num_read, joined(parts), states=self._saved_states())

    def _saved_states(self) -> dict[int, SavedState]:
        states = {}
        for position, operator in self.saving.items():
            if isinstance(operator, RemoteOperator):
                states[position] = operator.saved_state()
            else:
                self.watch(f"operators[{position}]: {operator.label!r}, in state")
                states[position] = encoded(operator)
        self.watch("")
        return states

    def _restore_state(self) -> None:
        """Gives operators that keep state what they saved, or shows them the rows of the sessions before,
        chunk by chunk as then.
        """
        if self.spec.states is not None:
            load_states(self.operators, self.spec.states, self.watch)
            return
        if self.spec.earlier is None or not stateful_part(self.operators):
            return
        dropped_by = values_of(self.spec.earlier["dropped_by"])
        for start, end in chunk_bounds(0, self.spec.first_row, whole_set=self.whole_set):
            rows = self.reader.rows(start, end)
            usable = [
                by for by, reason in zip(dropped_by[start:end], rows.reasons, strict=False) if not reason
            ]
            with taking_turns(self.operators, turn_of(start)):
                replay_state(
                    self.operators, rows.for_operators(), usable,
                    row_kind="task", stage=self.spec.stage, watch=self.watch,
                )  # fmt: skip
        self.watch("")


class InProcessChunks:
    """Reads and filters in the calling thread."""

    def __init__(
        self, spec: StreamSpec, reader: TaskReader, window: Window, engines: TaskEngines | None = None
    ) -> None:
        self.spec, self.reader, self.window, self.engines = spec, reader, window, engines
        self._at_work = ("", time.monotonic())

    def __iter__(self) -> Generator[Chunk]:
        operators = build_operators(self.spec.pipeline.operators, self.spec.base_dir)
        connect_engines(operators, self.engines, self.spec.taskset)
        worker = ChunkWorker(self.spec, self.reader, operators, self._watch)
        with prepared(operators, self._watch):
            self._watch("")
            while (span := self.window.take()) is not None:
                try:
                    chunk = worker.chunk(*span)
                except TrinityError as error:
                    chunk = Chunk(*span, None, str(error))
                if chunk.filtered is not None or chunk.error:
                    yield chunk
                if chunk.end < span[1]:
                    return

    def acknowledge(self, row: int) -> None:
        self.window.acknowledge(row)

    def at_work(self) -> tuple[str, float]:
        operator, since = self._at_work
        return operator, time.monotonic() - since

    def describe_crash(self) -> str:
        return ""

    def close(self) -> None:
        self.window.close()

    def _watch(self, operator: str) -> None:
        self._at_work = (operator, time.monotonic())
