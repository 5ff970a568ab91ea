"""Runs operators one after another over a table, in process.

Every operator leaves one decision for every row it saw; the rows passed in are not modified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from trinity_data.schema import DECISIONS, EXPERIENCES, OPERATORS, OUTCOMES
from trinity_operators.base import (
    Bools,
    Column,
    Expander,
    Expansion,
    Filter,
    FilterResult,
    Floats,
    Mapper,
    MapperResult,
    Operator,
)
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
from trinity_operators.filters import choose_reason

RowKind = Literal["task", "experience"]
Watch = Callable[[str], None]

_BLOCK = 1024


@dataclass(frozen=True)
class Metric:
    """A number that an operator reported: a mean over `rows`, or a total where that is 0."""

    value: float
    rows: int

    def __add__(self, other: Metric) -> Metric:
        """The same number over both calls."""
        rows = self.rows + other.rows
        if not rows:
            return Metric(self.value + other.value, 0)
        return Metric((self.value * self.rows + other.value * other.rows) / rows, rows)


@dataclass(frozen=True)
class OperatorCount:
    """What one operator did to one table."""

    operator: str
    position: int
    version: str
    rows_in: int
    rows_out: int
    microseconds: float
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """What the operator itself reported, by name."""

    def __add__(self, other: OperatorCount) -> OperatorCount:
        """The same operator over both tables."""
        metrics = dict(self.metrics)
        for name, metric in other.metrics.items():
            metrics[name] = metrics[name] + metric if name in metrics else metric
        return replace(
            self,
            rows_in=self.rows_in + other.rows_in,
            rows_out=self.rows_out + other.rows_out,
            microseconds=self.microseconds + other.microseconds,
            metrics=metrics,
        )


@dataclass(frozen=True)
class Result:
    """What the operators made of a table. `ids`, `kept`, `dropped_by` and `values` are about every input row,
    in input order, and behind them about the rows that expanders made.
    """

    survivors: pa.Table
    """The rows that were kept, with every column the operators wrote; a row that was made stands where the
    row stood that it is made of.
    """
    ids: pa.Array[Any]
    """A row that was made has the id of its parent and its number there, `t7/2`, until it is stored."""
    kept: Bools
    dropped_by: pa.StringArray
    """The label of the operator that dropped the row; empty when it was kept."""
    values: dict[str, Floats]
    """`reward` and `advantage` where there are any, and every score: a dropped row shows what it had then."""
    tokens: dict[str, pa.Array[Any]]
    """Those of `TOKEN_COLUMNS` that were written."""
    decisions: pa.Table
    counts: tuple[OperatorCount, ...]
    made: pa.Table
    """The rows that expanders made, as they made them."""
    parents: npt.NDArray[np.int64]
    """Of each of them the number of the row that it is made of: an input row, or a row made before it."""

    @property
    def score_names(self) -> list[str]:
        return [name for name in self.values if name not in ("reward", "advantage")]


@dataclass(frozen=True)
class _OperatorResult:
    """What one operator decided about the rows it saw."""

    keep: Bools
    reason: pa.Array[Any]
    before: Floats
    after: Floats
    metrics: Mapping[str, Metric]


@dataclass
class _RunState:
    """The remaining rows, and every number written so far: of the input rows, then of the rows made."""

    rows: pa.Table
    id_column: str
    ids: pa.Array[Any]
    index: npt.NDArray[np.int64]  # of each remaining row among all
    values: dict[str, Floats]
    dropped: npt.NDArray[np.int64]  # 1 + the position of the operator that dropped the row, 0 while it is in
    seen: list[npt.NDArray[np.int64]] = field(default_factory=list)
    results: list[_OperatorResult] = field(default_factory=list)
    counts: list[OperatorCount] = field(default_factory=list)
    made: list[pa.Table] = field(default_factory=list)
    parents: list[npt.NDArray[np.int64]] = field(default_factory=list)
    tokens: dict[str, pa.Array[Any]] = field(default_factory=dict)


@contextmanager
def prepared(operators: Sequence[Operator], watch: Watch | None = None) -> Iterator[None]:
    """Prepares the operators in their order and closes those that were, last first.

    Raises OperatorError where one of them cannot be prepared.
    """
    with ExitStack() as stack:
        for position, operator in enumerate(operators):
            if watch is not None:
                watch(f"operators[{position}]: {operator.label!r}, in prepare")
            try:
                operator.prepare()
            except OperatorError as error:
                raise OperatorError(f"operators[{position}]: {error}") from error
            # the boundary to code of other people: the message names the operator, whatever it raises
            except (Exception, SystemExit) as error:
                what = f"{operator.label!r} cannot be prepared: {type(error).__name__}: {error}"
                raise OperatorError(f"operators[{position}]: {what}") from error
            stack.callback(operator.close)
        yield


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
    """Pass `rows` through the operators. Whole-group operators need all rows of every group in `rows`,
    those of `whole_set` all rows of the task set.

    `watch` is called with a description before each operator begins: an operator may never return.
    """
    values = {}
    # a task set may have columns of these names, which are no rewards of rollouts
    for name in ("reward", "advantage") if row_kind == "experience" else ():
        if rows.schema.get_field_index(name) >= 0:
            values[name] = np.array(rows[name].to_numpy(zero_copy_only=False), dtype=np.float64)
    ids = rows[id_column].combine_chunks()
    nowhere = np.zeros(rows.num_rows, dtype=np.int64)
    work = _RunState(rows, id_column, ids, np.arange(rows.num_rows), values, nowhere)
    for position, operator in enumerate(operators):
        if isinstance(operator, Expander) and row_kind == "experience":
            raise OperatorError(f"operators[{position}]: {no_expander(operator)}")
        if watch is not None and work.rows.num_rows:
            name, first, count = operator.label, work.rows[id_column][0].as_py(), work.rows.num_rows
            watch(f"operators[{position}]: {name!r}, at {count} rows, the first of them {first!r}")
        _run_one(operator, position, work)
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


def scores_column(result: Result, where: Bools | None = None) -> pa.MapArray[Any, Any]:
    """The `scores` of every input row, or of those in `where`; a score that a row never got is left out."""
    names = result.score_names
    num_rows = len(result.kept) if where is None else int(np.count_nonzero(where))
    # any: the stubs want offsets of 64 bits, Arrow has them of 32
    offsets: Any
    if not names:
        offsets = np.zeros(num_rows + 1, dtype=np.int32)
        return pa.MapArray.from_arrays(offsets, pa.array([], pa.string()), pa.array([], pa.float64()))
    columns = [result.values[name] if where is None else result.values[name][where] for name in names]
    numbers = np.stack(columns, axis=1)
    is_present = ~np.isnan(numbers)
    offsets = np.concatenate(([0], np.cumsum(is_present.sum(axis=1)))).astype(np.int32)
    keys = choose_reason(names, np.nonzero(is_present)[1])
    return pa.MapArray.from_arrays(pa.array(offsets), keys, pa.array(numbers[is_present], pa.float64()))


def outcomes_table(result: Result, rows: pa.Table, *, stage: str, step: int | None) -> pa.Table:
    """The `outcomes` rows of the experiences `rows` that were passed in."""
    no_numbers = np.full(len(result.kept), np.nan)
    columns = {
        "experience_id": rows["experience_id"],
        "group_id": rows["group_id"],
        "stage": _same(stage, rows.num_rows),
        "step": pa.repeat(pa.scalar(step, pa.int64()), rows.num_rows),
        "reward": _nullable(result.values.get("reward", no_numbers)),
        "advantage": _nullable(result.values.get("advantage", no_numbers)),
        "scores": scores_column(result),
        "kept": pa.array(result.kept),
        "dropped_by": result.dropped_by,
        **result.tokens,
    }
    nulls = {
        field.name: pa.nulls(rows.num_rows, field.type) for field in OUTCOMES if field.name not in columns
    }
    return pa.table(columns | nulls).select(OUTCOMES.names).cast(OUTCOMES)


def counts_table(
    counts: Sequence[OperatorCount], *, pipeline: RowKind, stage: str, step: int | None
) -> pa.Table:
    """The `operators` rows of one run."""
    rows = [
        vars(count)
        | {"stage": stage, "step": step, "pipeline": pipeline}
        | {"metrics": [(name, metric.value) for name, metric in sorted(count.metrics.items())]}
        for count in counts
    ]
    return pa.Table.from_pylist(rows, schema=OPERATORS)


def _run_one(operator: Operator, position: int, work: _RunState) -> None:
    """One operator over the remaining rows; with none remaining it is not called."""
    rows_in = work.rows.num_rows
    started = perf_counter_ns()
    metrics: Mapping[str, Metric] = {}
    if rows_in:
        seen = work.index
        result = _apply(operator, position, work)
        metrics = result.metrics
        work.seen.append(seen)
        work.results.append(result)
        if not result.keep.all():
            work.dropped[seen[~result.keep]] = position + 1
        if not result.keep.all() and not isinstance(operator, Expander):
            work.index = seen[result.keep]
            # filtering costs the same for few rows as for none,
            # so the common case of a whole group dropped is cut short
            remaining = work.rows.filter(pa.array(result.keep)) if len(work.index) else work.rows.slice(0, 0)
            work.rows = remaining
    microseconds = (perf_counter_ns() - started) / 1000
    work.counts.append(
        OperatorCount(
            operator.label, position, operator.version, rows_in, work.rows.num_rows, microseconds, metrics
        )
    )


def _apply(operator: Operator, position: int, work: _RunState) -> _OperatorResult:
    try:
        for name in operator.reads:
            if work.rows.schema.get_field_index(name) < 0:
                raise OperatorError(missing_column(operator, name, work.rows.schema.names))
        if isinstance(operator, Filter):
            return _filter(operator, work)
        if isinstance(operator, Mapper):
            return _map(operator, work)
        if isinstance(operator, Expander):
            return _expand(operator, work)
        raise OperatorError(f"{operator.label!r} is neither a Filter nor a Mapper nor an Expander")
    except OperatorError as error:
        raise OperatorError(f"operators[{position}]: {error}") from error
    # the boundary to code of other people: the message names the operator, whatever it raises,
    # sys.exit included
    except (Exception, SystemExit) as error:
        what = f"{operator.label!r} failed on {work.rows.num_rows} rows: {type(error).__name__}: {error}"
        raise OperatorError(f"operators[{position}]: {what}") from error


def _filter(operator: Filter, work: _RunState) -> _OperatorResult:
    num_rows = work.rows.num_rows
    result = operator.apply(work.rows)
    keep = np.asarray(result.keep)
    if keep.dtype != np.bool_:
        raise OperatorError(f"{operator.label!r}: keep must hold booleans, found {keep.dtype}")
    check_length(operator, "keep", len(keep), num_rows)
    check_written(operator, result.scores.keys(), work.rows)
    for name, column in result.scores.items():
        _write(operator, name, column, work)
    _add(operator, result.added, work)
    value = (
        np.full(num_rows, np.nan)
        if result.value is None
        else numbers_of(operator, "value", result.value, num_rows)
    )
    reasons = _same("", num_rows) if keep.all() else _reasons(operator, result.reason, ~keep)
    return _OperatorResult(keep, reasons, value, value, _metrics(operator, result, num_rows))


def _map(operator: Mapper, work: _RunState) -> _OperatorResult:
    num_rows = work.rows.num_rows
    result = operator.map(work.rows)
    if not isinstance(result, MapperResult):
        result = MapperResult(result)
    columns = result.columns
    check_written(operator, columns.keys(), work.rows)
    first = next(iter(operator.writes or columns), None)
    before = as_recorded(work.rows, first)
    for name, column in columns.items():
        _write(operator, name, column, work)
    _add(operator, result.added, work)
    keep = np.ones(num_rows, dtype=np.bool_)
    return _OperatorResult(
        keep=keep,
        reason=_reasons(operator, result.reason, keep),
        before=before,
        after=as_recorded(work.rows, first),
        metrics=_metrics(operator, result, num_rows),
    )


def _expand(operator: Expander, work: _RunState) -> _OperatorResult:
    """Puts the new rows in the place of those they are made of; the decisions count them."""
    result = operator.expand(work.rows)
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
    for name, column in result.columns.items():
        _write(operator, name, column, work)
    _add(operator, result.added, work)
    work.made.append(work.rows.filter(pa.array(new)))
    reasons = pc.if_else(pa.array(counts == 0), none, pc.if_else(pa.array(several), texts, ""))
    return _OperatorResult(
        keep=counts == 1,
        reason=reasons,
        before=np.ones(num_rows),
        after=counts.astype(np.float64),
        metrics=_metrics(operator, result, num_rows),
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
        return choose_reason(["", reason], where) if reason and where.any() else _same("", len(where))
    check_length(operator, "reason", len(reason), len(where))
    texts: pa.Array[Any] = pc.if_else(pa.array(where), pa.array(reason, type=pa.string()), "")
    return texts


def _add(operator: Operator, columns: Mapping[str, Column], work: _RunState) -> None:
    """Columns of any type that only operators see, and that a task keeps."""
    ours = OF_THE_TASK if work.id_column == "task_id" else EXPERIENCES.names
    taken = {*FIXED_COLUMNS, *ours, *work.values}
    for name, column in columns.items():
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


def _metrics(
    operator: Operator, result: FilterResult | MapperResult | Expansion, num_rows: int
) -> dict[str, Metric]:
    """What an operator reports of a call; a number that is not finite says nothing and is left out."""
    numbers = [(result.metrics, num_rows), (result.totals, 0)]
    metrics = {}
    for reported, rows in numbers:
        for name, value in reported.items():
            if isinstance(value, bool) or not isinstance(value, int | float | np.number):
                raise OperatorError(f"{operator.label!r}: metric {name!r} must be a number, found {value!r}")
            if np.isfinite(value):
                metrics[name] = Metric(float(value), rows)
    return metrics


def _write(operator: Operator, name: str, column: Column, work: _RunState) -> None:
    """Put a column into the working rows; a column that was there keeps its type."""
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
    if position >= 0:
        work.rows = work.rows.set_column(position, work.rows.schema.field(position), array)
    else:
        work.rows = work.rows.append_column(name, array)


def _ids_at(ids: pa.Array[Any], index: npt.NDArray[np.int64]) -> pa.Array[Any]:
    """The ids of these rows; most often of all."""
    return ids if len(index) == len(ids) else ids.take(index)


def _nullable(numbers: Floats) -> pa.Array[Any]:
    return pa.array(numbers, type=pa.float64(), from_pandas=True)


def _same(text: str, num_rows: int) -> pa.Array[Any]:
    return _block(text).slice(0, num_rows) if num_rows <= _BLOCK else pa.repeat(text, num_rows)


@lru_cache(maxsize=1024)
def _block(text: str) -> pa.Array[Any]:
    """Made once a text: small tables come by the thousand, and a slice costs a tenth of a new array."""
    return pa.repeat(text, _BLOCK)


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
        "row_kind": _same(row_kind, total),
        "row_id": pa.concat_arrays([_ids_at(work.ids, index) for index in work.seen]),
        "stage": _same(stage, total),
        "step": pa.repeat(pa.scalar(step, pa.int64()), total),
        "operator": pa.concat_arrays([_same(count.operator, count.rows_in) for count in counts]),
        "position": pa.array(np.repeat(np.array([c.position for c in counts], dtype=np.int32), sizes)),
        "version": pa.concat_arrays([_same(count.version, count.rows_in) for count in counts]),
        "kept": pa.array(np.concatenate([s.keep for s in work.results])),
        "reason": pa.concat_arrays([s.reason for s in work.results]),
        "value_before": _nullable(np.concatenate([s.before for s in work.results])),
        "value_after": _nullable(np.concatenate([s.after for s in work.results])),
        "microseconds": pa.array(np.repeat([c.microseconds / c.rows_in for c in counts], sizes)),
    }
    return pa.Table.from_arrays([columns[name] for name in DECISIONS.names], schema=DECISIONS)
