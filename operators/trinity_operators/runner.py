"""Runs a chain of operators over a table.

Every operator leaves one decision for every row it saw; the rows passed in are not modified.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from time import perf_counter_ns
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.dataset.task import OF_THE_TASK
from trinity_data.errors import OperatorError
from trinity_data.schema import DECISIONS, EXPERIENCES
from trinity_operators.base import (
    Bools,
    Column,
    Expander,
    Expansion,
    FilterResult,
    Floats,
    MapperResult,
    Operator,
    choose_reason,
    group_codes,
)
from trinity_operators.calls import Call, Calls, LocatedError, Output, Watch, run_calls
from trinity_operators.checks import (
    FIXED_COLUMNS,
    TOKEN_COLUMNS,
    as_array,
    as_recorded,
    check_finite,
    check_length,
    check_written,
    missing_column,
    numbers_of,
    token_values,
)
from trinity_operators.counts import DROPPED_TOKENS, ERRORS, Metric, OperatorCount, reported_metrics
from trinity_operators.result import Result, nullable, same_text

RowKind = Literal["task", "experience"]
ERROR_REASON = "error: "
"""How the reason begins of a row on which an operator failed."""


@dataclass(frozen=True)
class _OperatorResult:
    """What one operator decided about the rows it saw."""

    keep: Bools
    reason: pa.Array[Any]
    before: Floats
    after: Floats
    metrics: Mapping[str, Metric]
    rewards: tuple[Floats, Floats] | None = None
    """Before and after, of a mapper that writes the reward."""


@dataclass
class _RunState:
    """The remaining rows, and every number written so far: of the input rows, then of the rows made."""

    rows: pa.Table
    id_column: str
    ids: pa.Array[Any]
    index: npt.NDArray[np.int64]  # of each remaining row among all
    values: dict[str, Floats]
    drops_failures: bool
    dropped: npt.NDArray[np.int64]  # 1 + the position of the operator that dropped the row, 0 while it is in
    seen: list[npt.NDArray[np.int64]] = field(default_factory=list)
    results: list[_OperatorResult] = field(default_factory=list)
    counts: list[OperatorCount] = field(default_factory=list)
    made: list[pa.Table] = field(default_factory=list)
    parents: list[npt.NDArray[np.int64]] = field(default_factory=list)
    tokens: dict[str, pa.Array[Any]] = field(default_factory=dict)

    def keep(self, remaining: Bools) -> None:
        """Only these of the rows go on."""
        self.index = self.index[remaining]
        # filtering costs the same for few rows as for none,
        # so the common case of a whole group dropped is cut short
        self.rows = self.rows.filter(pa.array(remaining)) if len(self.index) else self.rows.slice(0, 0)


def run_operators(
    operators: Sequence[Operator],
    rows: pa.Table,
    *,
    row_kind: RowKind,
    id_column: str,
    stage: str,
    step: int | None,
    watch: Watch | None = None,
) -> Result:
    """Passes `rows` through the operators, one after another, in process.

    Whole-group operators need all rows of every group in `rows`, those of `whole_set` all rows of the task
    set. `watch` is called with a description before each operator begins: an operator may never return.
    """
    calls = operator_calls(operators, rows, row_kind=row_kind, id_column=id_column, stage=stage, step=step)
    return run_calls(calls, watch)


def operator_calls(
    operators: Sequence[Operator],
    rows: pa.Table,
    *,
    row_kind: RowKind,
    id_column: str,
    stage: str,
    step: int | None,
    drops_failures: bool = False,
) -> Calls[Result]:
    """The same, the calls of the operators being left to the caller.

    With `drops_failures`, rows of groups on which an operator fails are dropped with the error as their
    reason, and it is called again with the others; without, the first error is raised.
    """
    values = {}
    # a task set may have columns of these names, which are no rewards of rollouts
    for name in ("reward", "advantage") if row_kind == "experience" else ():
        if rows.schema.get_field_index(name) >= 0:
            values[name] = np.array(rows[name].to_numpy(zero_copy_only=False), dtype=np.float64)
    ids = rows[id_column].combine_chunks()
    nowhere = np.zeros(rows.num_rows, dtype=np.int64)
    work = _RunState(rows, id_column, ids, np.arange(rows.num_rows), values, drops_failures, nowhere)
    for position, operator in enumerate(operators):
        if isinstance(operator, Expander) and row_kind == "experience":
            raise OperatorError(f"operators[{position}]: {no_expander(operator)}")
        yield from _run_one(operator, position, work)
    kept = work.dropped == 0
    labels = ["", *(operator.label for operator in operators)]
    return Result(
        survivors=work.rows,
        ids=work.ids,
        kept=kept,
        dropped_by=choose_reason(labels, work.dropped),
        values=work.values,
        tokens=work.tokens,
        decisions=_decisions(work, row_kind, stage, step),
        counts=tuple(work.counts),
        made=pa.concat_tables(work.made or [rows.slice(0, 0)], promote_options="default"),
        parents=np.concatenate([np.zeros(0, dtype=np.int64), *work.parents]),
    )


def no_expander(operator: Operator) -> str:
    """Why an expander cannot run on experiences."""
    return (
        f"{operator.label!r} makes several rows of one; an experience is what one rollout sampled and stays "
        "one row: put it into the task pipeline"
    )


def _run_one(operator: Operator, position: int, work: _RunState) -> Calls[None]:
    """One operator over the remaining rows; with none remaining it is not called."""
    started, rows, index = perf_counter_ns(), work.rows, work.index
    if not rows.num_rows:
        work.counts.append(OperatorCount(operator.label, position, operator.version, 0, 0, 0.0))
        return
    try:
        result = yield from _apply(operator, position, work)
    except OperatorError as error:
        if not work.drops_failures:
            raise
        work.rows, work.index = rows, index
        errors = yield from _errors_by_group(operator, position, work, str(error))
        failed = np.array([bool(text) for text in errors])
        _record(operator, position, work, index[failed], ~failed, _failure(errors), started)
        if work.rows.num_rows:
            yield from _run_one(operator, position, work)
        return
    _record(operator, position, work, index, result.keep, result, started)


def _record(
    operator: Operator,
    position: int,
    work: _RunState,
    seen: npt.NDArray[np.int64],
    remaining: Bools,
    result: _OperatorResult,
    started: int,
) -> None:
    """Keeps what an operator decided about the rows `seen`; of all rows only the `remaining` go on."""
    work.seen.append(seen)
    work.results.append(result)
    metrics = result.metrics
    if not remaining.all():
        work.dropped[seen[~result.keep]] = position + 1
        if work.id_column == "experience_id" and "response_length" in work.rows.column_names:
            tokens = pc.sum(work.rows["response_length"].filter(pa.array(~remaining))).as_py()
            metrics = {**metrics, DROPPED_TOKENS: Metric(float(tokens), 0)} if tokens else metrics
    if not remaining.all() and not isinstance(operator, Expander):
        work.keep(remaining)
    rows_out = work.rows.num_rows if isinstance(operator, Expander) else int(result.keep.sum())
    microseconds = (perf_counter_ns() - started) / 1000
    label, version = operator.label, operator.version
    work.counts.append(OperatorCount(label, position, version, len(seen), rows_out, microseconds, metrics))


def _errors_by_group(
    operator: Operator, position: int, work: _RunState, error: str
) -> Generator[Call, Output, list[str]]:
    """Of each remaining row why the operator fails on its group alone; "" where it does not."""
    everywhere = [error] * work.rows.num_rows
    if operator.keeps_state or operator.whole_steps or operator.whole_set:
        return everywhere
    codes, num_groups = group_codes(work.rows)
    texts = [""] * num_groups
    for number in range(num_groups) if num_groups > 1 else ():
        where = codes == number
        values = {name: column.copy() for name, column in work.values.items()}
        rows, index = work.rows.filter(pa.array(where)), work.index[where]
        part = replace(work, rows=rows, index=index, values=values, tokens=dict(work.tokens))
        try:
            yield from _apply(operator, position, part)
        except OperatorError as group_error:
            texts[number] = str(group_error)
    # one that only fails on all groups together has no group to blame
    return [texts[code] for code in codes] if any(texts) else everywhere


def _failure(errors: Sequence[str]) -> _OperatorResult:
    """Of rows on which an operator failed."""
    texts = [f"{ERROR_REASON}{text}" for text in errors if text]
    nowhere = np.full(len(texts), np.nan)
    keep, metrics = np.zeros(len(texts), dtype=np.bool_), {ERRORS: Metric(float(len(texts)), 0)}
    return _OperatorResult(keep, pa.array(texts), nowhere, nowhere, metrics)


def _apply(operator: Operator, position: int, work: _RunState) -> Generator[Call, Output, _OperatorResult]:
    """Raises OperatorError, whatever the operator raises."""
    try:
        for name in operator.reads:
            if work.rows.schema.get_field_index(name) < 0:
                raise OperatorError(missing_column(operator, name, work.rows.schema.names))
        output = yield Call(operator, position, work.rows, work.id_column)
        if isinstance(output, FilterResult):
            return _filter(operator, output, work)
        if isinstance(output, MapperResult):
            return _map(operator, output, work)
        return _expand(operator, output, work)
    except LocatedError:
        raise
    except OperatorError as error:
        raise OperatorError(f"operators[{position}]: {error}") from error
    # the boundary to code of other people: the message names the operator, whatever it raises,
    # sys.exit included
    except (Exception, SystemExit) as error:
        what = f"{operator.label!r} failed on {work.rows.num_rows} rows: {type(error).__name__}: {error}"
        raise OperatorError(f"operators[{position}]: {what}") from error


def _filter(operator: Operator, result: FilterResult, work: _RunState) -> _OperatorResult:
    num_rows = work.rows.num_rows
    keep = np.asarray(result.keep)
    if keep.dtype != np.bool_:
        raise OperatorError(f"{operator.label!r}: keep must hold booleans, found {keep.dtype}")
    check_length(operator, "keep", len(keep), num_rows)
    check_written(operator, result.scores.keys(), work.rows)
    has_answer = _has_answer(operator, result.errors, work)
    _put(operator, result.scores, result.added, work, has_answer)
    value = (
        np.full(num_rows, np.nan)
        if result.value is None
        else numbers_of(operator, "value", result.value, num_rows)
    )
    reasons = same_text("", num_rows) if keep.all() else _reasons(operator, result.reason, ~keep)
    metrics = reported_metrics(operator, result, num_rows)
    answer = _OperatorResult(keep, reasons, value, value, metrics)
    return answer if has_answer is None else _without_answer(answer, result.errors, has_answer)


def _map(operator: Operator, result: MapperResult, work: _RunState) -> _OperatorResult:
    num_rows, columns = work.rows.num_rows, result.columns
    check_written(operator, columns.keys(), work.rows)
    first = next(iter(operator.writes or columns), None)
    before = as_recorded(work.rows, first)
    reward_before = as_recorded(work.rows, "reward") if "reward" in columns else None
    has_answer = _has_answer(operator, result.errors, work)
    _put(operator, columns, result.added, work, has_answer)
    keep = np.ones(num_rows, dtype=np.bool_)
    answer = _OperatorResult(
        keep=keep,
        reason=_reasons(operator, result.reason, keep),
        before=before,
        after=as_recorded(work.rows, first),
        metrics=reported_metrics(operator, result, num_rows),
        rewards=None if reward_before is None else (reward_before, as_recorded(work.rows, "reward")),
    )
    return answer if has_answer is None else _without_answer(answer, result.errors, has_answer)


def _has_answer(operator: Operator, errors: Sequence[str], work: _RunState) -> Bools | None:
    """On which rows the operator did not fail; None where it failed on none of them.

    Raises OperatorError for the first error of experiences that are not to be dropped.
    """
    if not any(errors):
        return None
    check_length(operator, "errors", len(errors), work.rows.num_rows)
    failed = np.array([bool(text) for text in errors], dtype=np.bool_)
    # a task without an answer is dropped, as one that a filter refuses; `max_error_rate` is of experiences
    if not work.drops_failures and work.id_column == "experience_id":
        first = int(np.flatnonzero(failed)[0])
        row_id = work.rows[work.id_column][first].as_py()
        raise OperatorError(f"{operator.label!r} failed on {row_id!r}: {errors[first]}")
    return ~failed


def _without_answer(result: _OperatorResult, errors: Sequence[str], has_answer: Bools) -> _OperatorResult:
    """The same, with the rows dropped on which the operator failed."""
    texts = pa.array([f"{ERROR_REASON}{text}" for text in errors])
    return _OperatorResult(
        keep=result.keep & has_answer,
        reason=pc.if_else(pa.array(has_answer), result.reason, texts),
        before=result.before,
        after=np.where(has_answer, result.after, np.nan),
        metrics={**result.metrics, ERRORS: Metric(float((~has_answer).sum()), 0)},
        rewards=result.rewards,
    )


def _expand(operator: Operator, result: Expansion, work: _RunState) -> _OperatorResult:
    """Puts the new rows in the place of those they are made of; the decisions count them."""
    parents, num_rows = np.asarray(result.parents, dtype=np.int64), work.rows.num_rows
    if len(parents) and (parents.min() < 0 or parents.max() >= num_rows or (np.diff(parents) < 0).any()):
        raise OperatorError(
            f"{operator.label!r}: parents must be numbers of rows below {num_rows}, in ascending order"
        )
    check_written(operator, result.columns.keys(), work.rows)
    counts = np.bincount(parents, minlength=num_rows)
    none, several = _reasons(operator, result.reason, counts == 0), counts > 1
    texts = choose_reason(["", *(f"becomes {count} rows" for count in range(1, counts.max() + 1))], counts)
    new = several[parents]
    _take(parents, new, work)
    _put(operator, result.columns, result.added, work)
    work.made.append(work.rows.filter(pa.array(new)))
    reasons = pc.if_else(pa.array(counts == 0), none, pc.if_else(pa.array(several), texts, ""))
    return _OperatorResult(
        keep=counts == 1,
        reason=reasons,
        before=np.ones(num_rows),
        after=counts.astype(np.float64),
        metrics=reported_metrics(operator, result, num_rows),
    )


def _take(parents: npt.NDArray[np.int64], new: Bools, work: _RunState) -> None:
    """The remaining rows become copies of their parents; a `new` one is a row of its own."""
    of_parent = work.index[parents]
    numbers = np.arange(len(parents)) - np.searchsorted(parents, parents) + 1
    ids = work.ids.take(of_parent)
    own = pc.binary_join_element_wise(ids, pa.array(numbers).cast(ids.type), pa.scalar("/", ids.type))
    ids = pc.if_else(pa.array(new), own, ids)
    place = work.rows.schema.get_field_index(work.id_column)
    rows = work.rows.take(parents)
    work.rows = rows.set_column(place, rows.schema.field(place), ids)
    work.index = np.where(new, len(work.ids) + np.cumsum(new) - 1, of_parent)
    work.ids = pa.concat_arrays([work.ids, ids.filter(pa.array(new))])
    for name, values in work.values.items():
        work.values[name] = np.concatenate([values, values[of_parent[new]]])
    work.dropped = np.concatenate([work.dropped, np.zeros(int(new.sum()), dtype=np.int64)])
    work.parents.append(of_parent[new])


def _reasons(operator: Operator, reason: str | Sequence[str] | pa.Array[Any], where: Bools) -> pa.Array[Any]:
    """The reason of every row in `where`. One reason of all is for rows that are dropped."""
    if isinstance(reason, str):
        return choose_reason(["", reason], where) if reason and where.any() else same_text("", len(where))
    check_length(operator, "reason", len(reason), len(where))
    texts: pa.Array[Any] = pc.if_else(pa.array(where), pa.array(reason, type=pa.string()), "")
    return texts


def _put(
    operator: Operator,
    written: Mapping[str, Column],
    added: Mapping[str, Column],
    work: _RunState,
    where: Bools | None = None,
) -> None:
    """What an operator wrote, and the columns of any type that only operators see and that a task keeps."""
    for name, column in written.items():
        _write(operator, name, column, work, where)
    ours = OF_THE_TASK if work.id_column == "task_id" else EXPERIENCES.names
    taken = {*FIXED_COLUMNS, *ours, *work.values}
    for name, column in added.items():
        array = column if isinstance(column, pa.Array | pa.ChunkedArray) else pa.array(column)
        check_length(operator, name, len(array), work.rows.num_rows)
        if name in taken:
            raise OperatorError(
                f"{operator.label!r} adds the column {name!r}, which is there and of another kind"
            )
        place = work.rows.schema.get_field_index(name)
        work.rows = (
            work.rows.append_column(name, array) if place < 0 else work.rows.set_column(place, name, array)
        )


def _write(
    operator: Operator, name: str, column: Column, work: _RunState, where: Bools | None = None
) -> None:
    """Puts a column into the working rows; a column that was there keeps its type, and its values where a
    row is not in `where`.
    """
    position = work.rows.schema.get_field_index(name)
    column_type = work.rows.schema.field(position).type if position >= 0 else pa.float64()
    array: pa.Array[Any] | pa.ChunkedArray[Any]
    if name in TOKEN_COLUMNS:
        array = token_values(operator, name, column, work.rows)
        earlier = work.tokens.get(name, pa.nulls(len(work.ids), array.type))
        places = np.arange(len(work.ids))
        places[work.index] = len(work.ids) + np.arange(len(array))
        work.tokens[name] = pa.concat_arrays([earlier, array]).take(pa.array(places))
    elif pa.types.is_floating(column_type):
        numbers = numbers_of(operator, name, column, work.rows.num_rows)
        if where is not None:
            numbers = np.where(where, numbers, as_recorded(work.rows, name))
        check_finite(operator, name, numbers, work.rows)
        if name not in work.values:
            work.values[name] = np.full(len(work.ids), np.nan)
        work.values[name][work.index] = numbers
        array = pa.array(numbers, type=column_type, from_pandas=True)
    else:
        texts = column if isinstance(column, pa.ChunkedArray) else as_array(column)
        check_length(operator, name, len(texts), work.rows.num_rows)
        kind = texts.type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)):
            raise OperatorError(f"{operator.label!r}: {name!r} must hold text, found {kind}")
        array = texts.cast(column_type)
        if where is not None:
            array = pc.if_else(pa.array(where), array, work.rows.column(position))
    if position >= 0:
        work.rows = work.rows.set_column(position, work.rows.schema.field(position), array)
    else:
        work.rows = work.rows.append_column(name, array)


def _ids_at(ids: pa.Array[Any], index: npt.NDArray[np.int64]) -> pa.Array[Any]:
    """The ids of these rows; most often of all."""
    return ids if len(index) == len(ids) else ids.take(index)


@lru_cache(maxsize=1)
def _no_decisions() -> pa.Table:
    """Not at import: the first array that pyarrow makes imports pandas."""
    return DECISIONS.empty_table()


def _decisions(work: _RunState, row_kind: RowKind, stage: str, step: int | None) -> pa.Table:
    """One row for every operator and row it saw, in that order."""
    if not work.results:
        return _no_decisions()
    counts = [count for count in work.counts if count.rows_in]
    sizes = [count.rows_in for count in counts]
    total = sum(sizes)
    columns = {
        "row_kind": same_text(row_kind, total),
        "row_id": pa.concat_arrays([_ids_at(work.ids, index) for index in work.seen]),
        "stage": same_text(stage, total),
        "step": pa.repeat(pa.scalar(step, pa.int64()), total),
        "operator": pa.concat_arrays([same_text(count.operator, count.rows_in) for count in counts]),
        "position": pa.array(np.repeat(np.array([c.position for c in counts], dtype=np.int32), sizes)),
        "version": pa.concat_arrays([same_text(count.version, count.rows_in) for count in counts]),
        "kept": pa.array(np.concatenate([s.keep for s in work.results])),
        "reason": pa.concat_arrays([s.reason for s in work.results]),
        "value_before": nullable(np.concatenate([s.before for s in work.results])),
        "value_after": nullable(np.concatenate([s.after for s in work.results])),
        "reward_before": _rewards(work, 0, total),
        "reward_after": _rewards(work, 1, total),
        "microseconds": pa.array(np.repeat([c.microseconds / c.rows_in for c in counts], sizes)),
    }
    return pa.Table.from_arrays([columns[name] for name in DECISIONS.names], schema=DECISIONS)


def _rewards(work: _RunState, which: Literal[0, 1], total: int) -> pa.Array[Any]:
    """Of each decision the reward before or after it, where the operator wrote it."""
    if not any(result.rewards for result in work.results):
        return pa.nulls(total, pa.float64())
    return nullable(
        np.concatenate([
            np.full(len(result.keep), np.nan) if result.rewards is None else result.rewards[which]
            for result in work.results
        ])
    )  # fmt: skip
