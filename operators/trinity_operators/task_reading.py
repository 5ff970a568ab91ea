"""A task set in the process that asks for it, without Ray: to evaluate it, or to look for a task."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow.compute as pc

from trinity_data.config import TasksetConfig
from trinity_data.dataset.reader import Source, chunks
from trinity_data.dataset.task import (
    Task,
    build_task_rows,
    check_taskset,
    tasks_from_table,
    wanted_columns,
)
from trinity_operators import trainable
from trinity_operators.base import Operator
from trinity_operators.chunk import CHUNK_ROWS
from trinity_operators.task_filtering import FilteredTasks, filter_tasks, for_evaluation


def read_and_filter(
    config: TasksetConfig, source: Source, order: Iterable[int], operators: Sequence[Operator], *, stage: str
) -> Iterator[FilteredTasks]:
    """The task set in this order, chunk by chunk, as the operators leave it.

    Raises ConfigError for a missing column.
    """
    columns = source.columns(wanted_columns(config))
    check_taskset(config, columns, source.name)
    position = 0
    for places in chunks(list(order), CHUNK_ROWS):
        rows = build_task_rows(
            config,
            source.rows(places),
            stage=stage,
            source=source.name,
            source_rows=source.row_numbers(places),
            first_position=position,
            columns=columns,
        )
        yield filter_tasks(operators, rows, stage=stage)
        position += len(places)


def read_for_evaluation(
    config: TasksetConfig, source: Source, operators: Sequence[Operator], *, stage: str
) -> tuple[list[Task], list[str]]:
    """The tasks of a held-out set, asked as in training, and why each of the others cannot be tried.

    No filter drops any.
    """
    found, left_out = list[Task](), list[str]()
    changing = for_evaluation(operators)
    for judged in read_and_filter(config, source, range(source.num_rows), changing, stage=stage):
        found += tasks_from_table(judged.tasks.filter(judged.tasks["kept"]))
        said = judged.decisions.filter(pc.equal(judged.decisions["operator"], trainable.OPERATOR))
        left_out += said["reason"].to_pylist()
    return found, left_out
