"""The task operators over the rows of a task set: what each row became, which operator dropped it, and why.

In the calling process: for an evaluation, for a search, and for a worker of the task pipeline.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.config import TasksetConfig
from trinity_data.dataset.reader import Source
from trinity_data.dataset.task import (
    OF_THE_TASK,
    Task,
    TaskRows,
    build_task_rows,
    check_taskset,
    task_id,
    tasks_from_table,
    wanted_columns,
)
from trinity_data.schema import rows_to_table
from trinity_operators import trainable
from trinity_operators.base import Filter, FilterResult, Mapper, Operator
from trinity_operators.runner import Result, Watch, counts_table, prepared, run_operators, scores_column

Order: TypeAlias = Sequence[int] | npt.NDArray[np.int64]
"""Row numbers of a task set in the order of reading."""

CHUNK_ROWS = 64
"""Rows that pass through the operators at once."""

# columns of a task that a mapper may write
_WRITTEN = ("prompt", "answer", "workflow", "reward_fn")


class TaskReader:
    """The task set's rows in an order, in chunks that are the same in every session.

    Raises ConfigError where the set lacks a column that its configuration names.
    """

    def __init__(self, config: TasksetConfig, source: Source, order: Order, *, stage: str) -> None:
        self.config, self.source, self.order, self.stage = config, source, order, stage
        self.columns = source.columns(wanted_columns(config))
        check_taskset(config, self.columns, source.name)

    def rows(self, start: int, end: int) -> TaskRows:
        """The rows at the places `start` to `end` − 1 of the order."""
        places = [int(place) for place in self.order[start:end]]
        return build_task_rows(
            self.config,
            self.source.rows(places),
            stage=self.stage,
            source=self.source.name,
            source_rows=self.source.row_numbers(places),
            first_position=start,
            columns=self.columns,
        )


def chunk_bounds(first_row: int, end_row: int) -> Iterator[tuple[int, int]]:
    """Start and end of each chunk; the last one is shorter."""
    for start in range(first_row, end_row, CHUNK_ROWS):
        yield start, min(start + CHUNK_ROWS, end_row)


@dataclass(frozen=True)
class FilteredTasks:
    """Rows for the store. A task's id is of what the operators made of it."""

    tasks: pa.Table
    decisions: pa.Table
    operators: pa.Table


def filter_tasks(
    operators: Sequence[Operator], rows: TaskRows, *, stage: str, watch: Watch | None = None
) -> FilteredTasks:
    """Passes the rows that can be tried through the operators; the others are dropped before."""
    given = rows.for_operators()
    result = run_operators(
        operators, given, row_kind="task", id_column="task_id", stage=stage, step=None, watch=watch
    )
    records: list[dict[str, Any]] = rows.tasks.to_pylist()
    unusable = dict[str, str]()
    _write_result(
        [record for record, reason in zip(records, rows.reasons, strict=True) if not reason], given, result
    )
    for record, reason in zip(records, rows.reasons, strict=True):
        if not reason and record["kept"] and not record["prompt"].strip():
            reason = "the operators left an empty prompt"
        if reason:
            record |= {"kept": False, "dropped_by": trainable.OPERATOR}
            unusable[record["task_id"]] = reason
    left_out = trainable.decisions(unusable, row_kind="task", stage=stage, step=None)
    return FilteredTasks(
        rows_to_table("tasks", records),
        pa.concat_tables([left_out, _renamed(result.decisions, given["task_id"].to_pylist(), records, rows)]),
        counts_table(result.counts, pipeline="task", stage=stage, step=None),
    )


def read_and_filter(
    config: TasksetConfig, source: Source, order: Order, operators: Sequence[Operator], *, stage: str
) -> Iterator[FilteredTasks]:
    """The task set in this order, chunk by chunk, as the operators leave it.

    Raises ConfigError for a missing column.
    """
    reader = TaskReader(config, source, order, stage=stage)
    with prepared(operators):
        for start, end in chunk_bounds(0, len(order)):
            yield filter_tasks(operators, reader.rows(start, end), stage=stage)


def read_for_evaluation(
    config: TasksetConfig, source: Source, operators: Sequence[Operator], *, stage: str
) -> tuple[list[Task], list[str]]:
    """The tasks of a held-out set, with prompts as in training, and why each of the others is left out.

    No filter drops any.
    """
    tasks, reasons = list[Task](), list[str]()
    changing = for_evaluation(operators)
    for filtered in read_and_filter(config, source, range(source.num_rows), changing, stage=stage):
        tasks += tasks_from_table(filtered.tasks.filter(filtered.tasks["kept"]))
        left_out = filtered.decisions.filter(pc.equal(filtered.decisions["operator"], trainable.OPERATOR))
        reasons += left_out["reason"].to_pylist()
    return tasks, reasons


def for_evaluation(operators: Sequence[Operator]) -> list[Operator]:
    """The operators that change what is asked, for tasks of which none may be dropped."""
    return [
        operator if isinstance(operator, Mapper) else _OnlyScores(operator)
        for operator in operators
        if isinstance(operator, Mapper) or (isinstance(operator, Filter) and operator.writes)
    ]


class _OnlyScores(Filter):
    """A filter whose scores a mapper may read, and which drops nothing."""

    def __init__(self, inner: Filter) -> None:
        self.inner = inner
        self.name, self.version, self.reads, self.writes = (
            inner.name,
            inner.version,
            inner.reads,
            inner.writes,
        )
        self.writes_more = inner.writes_more

    def prepare(self) -> None:
        self.inner.prepare()

    def close(self) -> None:
        self.inner.close()

    def apply(self, rows: pa.Table) -> FilterResult:
        return replace(self.inner.apply(rows), keep=np.ones(rows.num_rows, dtype=np.bool_))


def _write_result(records: list[dict[str, Any]], given: pa.Table, result: Result) -> None:
    """Writes to rows of `tasks` what the operators made of them; a new prompt is the last message too."""
    scores, dropped_by = scores_column(result).to_pylist(), result.dropped_by.to_pylist()
    own = [name for name in given.column_names if name not in OF_THE_TASK]
    survivors = iter(result.survivors.select([*_WRITTEN, *own]).to_pylist())
    before = given.select(own).to_pylist() if own else []
    for number, record in enumerate(records):
        record |= {
            "scores": scores[number],
            "kept": bool(result.kept[number]),
            "dropped_by": dropped_by[number],
        }
        if record["kept"]:
            found = next(survivors)
            _write(record, found, {name: found[name] for name in own if found[name] != before[number][name]})


def _write(record: dict[str, Any], found: dict[str, Any], changed: dict[str, Any]) -> None:
    written = {name: found[name] or "" for name in _WRITTEN}
    if any(record[name] != value for name, value in written.items()):
        record |= written
        record["messages"] = [
            *record["messages"][:-1],
            record["messages"][-1] | {"content": record["prompt"]},
        ]
        record["task_id"] = task_id(record["taskset"], record["source_row"], record)
    if changed:
        record["columns"] = json.dumps(json.loads(record["columns"]) | changed, ensure_ascii=False)


def _renamed(
    decisions: pa.Table, before: Sequence[str], records: Sequence[dict[str, Any]], rows: TaskRows
) -> pa.Table:
    """Decisions under the ids that the tasks have now."""
    now = [record["task_id"] for record, reason in zip(records, rows.reasons, strict=True) if not reason]
    names = dict(zip(before, now, strict=True))
    if list(before) == now:
        return decisions
    ids = pa.array([names[row_id] for row_id in decisions["row_id"].to_pylist()], pa.string())
    return decisions.set_column(decisions.schema.get_field_index("row_id"), "row_id", ids)
