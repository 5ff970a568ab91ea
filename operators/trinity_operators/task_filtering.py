"""The task operators over the rows of a task set: what each row became, which operator dropped it, and why.

In the calling process: for an evaluation, for a search, and for a worker of the task pipeline.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.config import TasksetConfig
from trinity_data.dataset.in_order import NumberedRows
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
from trinity_data.errors import ConfigError
from trinity_data.schema import content_id, rows_to_table, values_of
from trinity_operators import trainable
from trinity_operators.base import Filter, FilterResult, Mapper, Operator
from trinity_operators.calls import Watch
from trinity_operators.counts import counts_table
from trinity_operators.preparation import prepared
from trinity_operators.result import Result, scores_column
from trinity_operators.runner import run_operators
from trinity_operators.task_engines import RolloutOperator, asks_engines

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

    def __init__(self, config: TasksetConfig, source: NumberedRows, order: Order, *, stage: str) -> None:
        self.config, self.source, self.order, self.stage = config, source, order, stage
        self.columns = source.columns(wanted_columns(config))
        check_taskset(config, self.columns, source.name)

    def rows(self, start: int, end: int) -> TaskRows:
        """The rows at the places `start` to `end` − 1 of the order; of a stream fewer, where it ends."""
        places = [int(place) for place in self.order[start:end]]
        if min(places, default=0) < 0:
            raise ConfigError(
                f"task set {self.config.name!r}: {self.source.name} has changed, and rows that were read are "
                "gone; an operator that keeps state has to see them again: put them back, or begin a new run"
            )
        numbered = list(self.source.numbered(places))
        return build_task_rows(
            self.config,
            [row for _, row in numbered],
            stage=self.stage,
            source=self.source.name,
            source_rows=[number for number, _ in numbered],
            first_position=start,
            columns=self.columns,
        )


def chunk_bounds(first_row: int, end_row: int, *, whole_set: bool = False) -> Iterator[tuple[int, int]]:
    """Start and end of each chunk; the last one is shorter. With `whole_set` there is one."""
    size = max(end_row - first_row, 1) if whole_set else CHUNK_ROWS
    for start in range(first_row, end_row, size):
        yield start, min(start + size, end_row)


def needs_whole_set(operators: Sequence[Operator]) -> bool:
    """Whether an operator is to be called with all rows of the task set."""
    return any(operator.whole_set for operator in operators)


def no_whole_set(config: TasksetConfig, operators: Sequence[Operator]) -> str:
    """Why operators cannot have all rows of the task set at once; empty where they can, or need not."""
    is_queue = config.storage_type == "queue"
    # rollouts of a part of the tasks say the same about them
    needing = [each for each in operators if not (is_queue and isinstance(each, RolloutOperator))]
    names = ", ".join(repr(operator.label) for operator in needing if operator.whole_set)
    if names and is_queue:
        return f"task set {config.name!r}: {names} needs the whole set, which a queue never is"
    if not names or not config.has_no_end:
        return ""
    return (
        f"task set {config.name!r} is streamed, and only reading all of it tells where it ends; {names} "
        "needs the whole set: write limit, or streaming: false"
    )


@dataclass(frozen=True)
class FilteredTasks:
    """Rows for the store. A task's id is of what the operators made of it."""

    tasks: pa.Table
    decisions: pa.Table
    operators: pa.Table

    @property
    def tables(self) -> dict[str, pa.Table]:
        """By the names of the store's tables."""
        return dict(vars(self))


def joined(parts: Sequence[FilteredTasks]) -> FilteredTasks:
    """Consecutive chunks as one."""
    if len(parts) == 1:
        return parts[0]
    tables = {name: pa.concat_tables([part.tables[name] for part in parts]) for name in parts[0].tables}
    return FilteredTasks(**tables)


def filter_tasks(
    operators: Sequence[Operator], rows: TaskRows, *, stage: str, watch: Watch | None = None
) -> FilteredTasks:
    """Passes the rows that can be tried through the operators; the others are dropped before."""
    usable_rows = rows.for_operators()
    result = run_operators(
        operators, usable_rows, row_kind="task", id_column="task_id", stage=stage, step=None, watch=watch
    )
    if _says_the_same(usable_rows, result):
        ids, reason_of = values_of(result.ids), _reasons(rows)
        tasks = _with_outcome(rows, result)
    else:
        records, ids, reason_of = _changed_records(rows, usable_rows, result)
        tasks = rows_to_table("tasks", records)
    decisions = _renamed(result.decisions, values_of(result.ids), ids)
    if reason_of:
        about_unusable = trainable.decisions(reason_of, row_kind="task", stage=stage, step=None)
        decisions = pa.concat_tables([about_unusable, decisions])
    return FilteredTasks(
        tasks,
        decisions,
        counts_table(result.counts, pipeline="task", stage=stage, step=None),
    )


def read_and_filter(
    config: TasksetConfig,
    source: NumberedRows,
    order: Order,
    operators: Sequence[Operator],
    *,
    stage: str,
    first_row: int = 0,
) -> Iterator[FilteredTasks]:
    """The task set in this order from `first_row` on, chunk by chunk, as the operators leave it.

    Raises ConfigError for a missing column.
    """
    reader = TaskReader(config, source, order, stage=stage)
    with prepared(operators):
        for start, end in chunk_bounds(first_row, len(order), whole_set=needs_whole_set(operators)):
            rows = reader.rows(start, end)
            if rows.tasks.num_rows:
                yield filter_tasks(operators, rows, stage=stage)
            if rows.tasks.num_rows < end - start:
                return


def read_for_evaluation(
    config: TasksetConfig,
    source: Source,
    operators: Sequence[Operator],
    *,
    stage: str,
    models: Collection[str] = (),
) -> tuple[list[Task], list[str]]:
    """The tasks of a held-out set, with prompts as in training, and why each of the others is left out.

    No filter drops any, and none of the stage's `models` is asked.
    """
    tasks, reasons = list[Task](), list[str]()
    changing = for_evaluation(operators, models)
    for filtered in read_and_filter(config, source, range(source.num_rows), changing, stage=stage):
        tasks += tasks_from_table(filtered.tasks.filter(filtered.tasks["kept"]))
        is_unusable = pc.equal(filtered.decisions["operator"], pa.scalar(trainable.OPERATOR))
        reasons += values_of(filtered.decisions.filter(is_unusable)["reason"])
    return tasks, reasons


def for_evaluation(operators: Sequence[Operator], models: Collection[str] = ()) -> list[Operator]:
    """The operators that change what is asked, for tasks of which none may be dropped; without those that ask
    the engines of the stage, whose models have these names.
    """
    return [
        operator if isinstance(operator, Mapper) else _OnlyScores(operator)
        for operator in operators
        if not asks_engines(operator, models)
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
        self.writes_more, self.whole_set = inner.writes_more, inner.whole_set

    def prepare(self) -> None:
        self.inner.prepare()

    def close(self) -> None:
        self.inner.close()

    def apply(self, rows: pa.Table) -> FilterResult:
        return replace(self.inner.apply(rows), keep=np.ones(rows.num_rows, dtype=np.bool_))


def _reasons(rows: TaskRows) -> dict[str, str]:
    """By its id, of each row that cannot be tried."""
    ids = values_of(rows.tasks["task_id"])
    return {row_id: reason for row_id, reason in zip(ids, rows.reasons, strict=True) if reason}


def _says_the_same(rows: pa.Table, result: Result) -> bool:
    """Whether operators made no row, and left what the rows say as it was."""
    survivors = result.survivors
    if result.made.num_rows or not {*survivors.column_names} <= {*rows.column_names, *result.values}:
        return False
    kept = rows if result.kept.all() else rows.filter(pa.array(result.kept))
    unwritten = {"task_id", "messages", "images", "columns"}
    names = [name for name in rows.column_names if name not in unwritten]
    return all(survivors[name].equals(kept[name]) for name in names)


def _with_outcome(rows: TaskRows, result: Result) -> pa.Table:
    """The rows of `tasks` with what became of them. No row is looked at by Python, which costs as much as a
    cheap operator.
    """
    is_usable = np.array([not reason for reason in rows.reasons], dtype=np.bool_)
    kept = np.zeros(len(is_usable), dtype=np.bool_)
    kept[is_usable] = result.kept
    place = pa.array(np.cumsum(is_usable) - 1, mask=~is_usable)
    dropped_by = result.dropped_by.take(place).fill_null(trainable.OPERATOR)
    columns: dict[str, Any] = {"kept": pa.array(kept), "dropped_by": dropped_by}
    columns["scores"] = scores_column(result).take(place)
    tasks = rows.tasks
    for name, column in columns.items():
        number = tasks.schema.get_field_index(name)
        tasks = tasks.set_column(number, tasks.schema.field(number), column)
    return tasks


def _changed_records(
    rows: TaskRows, usable_rows: pa.Table, result: Result
) -> tuple[list[dict[str, Any]], list[str], dict[str, str]]:
    """Rows of `tasks` as the operators left them, the ids that those that they saw have now, and by its id
    why one cannot be tried.
    """
    records: list[dict[str, Any]] = rows.tasks.to_pylist()
    usable = [record for record, reason in zip(records, rows.reasons, strict=True) if not reason]
    reasons = _reasons(rows)
    processed = _write_result(usable, usable_rows, result)
    for record in processed:
        if record["kept"] and not record["prompt"].strip():
            reasons[record["task_id"]] = "the operators left an empty prompt"
    # a row that was made has the position of the row that it is made of, and comes behind it
    records = sorted([*records, *processed[len(usable) :]], key=itemgetter("position"))
    reason_of = {row_id: reasons[row_id] for record in records if (row_id := record["task_id"]) in reasons}
    for record in records:
        if record["task_id"] in reason_of:
            record |= {"kept": False, "dropped_by": trainable.OPERATOR}
    return records, [record["task_id"] for record in processed], reason_of


def _write_result(records: Sequence[dict[str, Any]], rows: pa.Table, result: Result) -> list[dict[str, Any]]:
    """Rows of `tasks` as the operators left them, those that expanders made behind the others."""
    own_columns = [name for name in rows.column_names if name not in OF_THE_TASK]
    old_rows = rows.select(own_columns).to_pylist()
    old_names = {*rows.column_names, *result.values}
    own_columns += [name for name in result.survivors.column_names if name not in old_names]
    for parent in result.parents:
        old_rows.append(old_rows[parent])
    survivors = result.survivors.select([*_WRITTEN, *own_columns]).to_pylist()
    survivor_of = dict(zip(result.survivors["task_id"].to_pylist(), survivors, strict=True))
    processed = [*records, *_made_records(records, result)]
    scores, dropped_by = values_of(scores_column(result)), values_of(result.dropped_by)
    siblings = Counter[str]()
    for number, (record, row_id) in enumerate(zip(processed, result.ids.to_pylist(), strict=True)):
        record |= {"scores": scores[number], "kept": row_id in survivor_of, "dropped_by": dropped_by[number]}
        if record["kept"]:
            survivor = survivor_of[row_id]
            old_row = old_rows[number]
            changed = [name for name in own_columns if survivor[name] != old_row.get(name)]
            _write(record, survivor, {name: survivor[name] for name in changed})
        if number >= len(records):
            parent = processed[result.parents[number - len(records)]]["task_id"]
            siblings[parent] += 1
            identity = (parent, siblings[parent], record["messages"], record["answer"])
            record |= {"parent": parent, "task_id": content_id(*identity)}
    return processed


def _made_records(records: Sequence[dict[str, Any]], result: Result) -> list[dict[str, Any]]:
    """The rows that expanders made: what they say, in the place of the row that each is made of."""
    ancestors = list(records)
    for row, parent in zip(result.made.select(_WRITTEN).to_pylist(), result.parents, strict=True):
        record = ancestors[parent] | {name: text or "" for name, text in row.items()}
        ancestors.append(record | {"messages": _with_prompt(record)})
    return ancestors[len(records) :]


def _with_prompt(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages, of which the prompt is the last."""
    return [*record["messages"][:-1], record["messages"][-1] | {"content": record["prompt"]}]


def _write(record: dict[str, Any], survivor: dict[str, Any], changed: dict[str, Any]) -> None:
    texts = {name: survivor[name] or "" for name in _WRITTEN}
    if any(record[name] != text for name, text in texts.items()):
        record |= texts
        record["messages"] = _with_prompt(record)
        record["task_id"] = task_id(record["taskset"], record["source_row"], record)
    if changed:
        record["columns"] = json.dumps(json.loads(record["columns"]) | changed, ensure_ascii=False)


def _renamed(decisions: pa.Table, old_ids: Sequence[str], new_ids: Sequence[str]) -> pa.Table:
    """Decisions under the ids that the tasks have now."""
    if list(old_ids) == list(new_ids):
        return decisions
    new_id_of = dict(zip(old_ids, new_ids, strict=True))
    ids = pa.array([new_id_of[row_id] for row_id in values_of(decisions["row_id"])], pa.string())
    return decisions.set_column(decisions.schema.get_field_index("row_id"), "row_id", ids)
