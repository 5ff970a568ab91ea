"""What every operator should do, checked on rows: the same answer however the rows come, odd values included.

The pipeline itself leaves out a call without rows; other callers may make one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.errors import OperatorError
from trinity_data.schema import TABLES, values_of
from trinity_operators.base import FilterResult, MapperResult, Operator
from trinity_operators.calls import output_of
from trinity_operators.preparation import prepared
from trinity_operators.runner import RowKind, run_operators
from trinity_operators.testing.results import RowResult, differences, results_of, run_on_ray
from trinity_operators.testing.rows import ID_COLUMNS

ODD_TEXTS = (
    "",
    " \t\n",
    "naïve café",
    "数学の問題",
    "مرحبا",
    "👩\u200d👩\u200d👧 2 + 2",
    "e\u0301",
    "\u202eabc",
    "a\u0000b",
    "x" * 10_000,
)
ON_RAY = "in process = Ray Data"
MAY_BE_MISSING = frozenset({"reward", "turn_reward", "token_rewards", "reward_parts", "metrics", "advantage"})
"""Of an experience. A task's own columns may always be missing."""

_NOT_TEXTS = frozenset({
    "task_id", "experience_id", "group_id", "parent", "stage", "taskset", "split", "source", "workflow",
    "reward_fn", "columns", "dropped_by", "explorer", "engine", "info", "truncated", "error", "preference",
    "tools",
})  # fmt: skip
_ALWAYS_READ = (
    "experience_id",
    "task_id",
    "group_id",
    "rollout",
    "response_length",
    "metrics",
    "reward_parts",
)
"""What joins rows, and the maps in which an argument may name an entry."""


@dataclass(frozen=True)
class Check:
    """One property of an operator on these rows."""

    name: str
    status: Literal["passed", "failed", "skipped"]
    text: str = ""
    """Why it failed, or does not apply."""


@dataclass(frozen=True)
class Subject:
    """The operator that is tested, built anew for each check, and the rows."""

    build: Callable[[], Operator]
    rows: pa.Table
    kind: RowKind

    def run(self, *tables: pa.Table) -> list[RowResult]:
        """What one operator makes of tables that it gets one after another."""
        operator = self.build()
        with prepared([operator]):
            return [result for table in tables for result in results_of(operator, table, self.kind)]


class CheckError(Exception):
    """A property does not hold."""


class SkipCheck(Exception):
    """A property is not claimed by the operator, or cannot be seen on these rows."""


def check_operator(build: Callable[[], Operator], rows: pa.Table, kind: RowKind) -> list[Check]:
    """All properties of an operator; only the first where the operator cannot process the rows at all."""
    subject = Subject(build, rows, kind)
    first = _check("processes the rows", lambda subject: subject.run(subject.rows) and None, subject)
    if first.status == "failed":
        return [first]
    return [first, *(_check(name, check, subject) for name, check in PROPERTIES.items())]


def check_on_ray(subject: Subject) -> Check:
    """Workers of Ray Data with a part of the rows each give what this process gives. Ray must be running."""
    operator = subject.build()
    if reason := _impure(operator):
        return Check(ON_RAY, "skipped", reason)
    # an operator that keeps state sees all rows in one worker
    parts = [subject.rows] if operator.keeps_state else parts_of(operator, subject.rows)
    try:
        results = run_on_ray(subject.build, parts, subject.kind)
    except OperatorError as error:
        return Check(ON_RAY, "failed", str(error).removeprefix("operators[0]: "))
    return check_results(ON_RAY, subject.run(subject.rows), results)


def check_results(name: str, expected: Sequence[RowResult], found: Sequence[RowResult]) -> Check:
    """Both say the same of every row."""
    differing = differences(expected, found)
    if not differing:
        return Check(name, "passed")
    return Check(name, "failed", f"rows that differ: {len(differing)}, as {differing[0]}")


def _check(name: str, check: Callable[[Subject], object], subject: Subject) -> Check:
    try:
        check(subject)
    except SkipCheck as reason:
        return Check(name, "skipped", str(reason))
    except CheckError as failure:
        return Check(name, "failed", str(failure))
    except OperatorError as error:
        return Check(name, "failed", str(error).removeprefix("operators[0]: "))
    return Check(name, "passed")


def _expect_same(expected: Sequence[RowResult], found: Sequence[RowResult], what: str) -> None:
    check = check_results(what, expected, found)
    if check.status == "failed":
        raise CheckError(f"{what}: {check.text}")


def _empty(subject: Subject) -> None:
    operator = subject.build()
    with prepared([operator]):
        try:
            output = output_of(operator, subject.rows.slice(0, 0))
        except OperatorError:
            raise
        # the boundary to code of other people
        except Exception as error:
            raise CheckError(f"{type(error).__name__}: {error}") from error
    if isinstance(output, MapperResult):
        columns: Mapping[str, Sized] = output.columns
    else:
        columns = {"keep": output.keep} if isinstance(output, FilterResult) else {"parents": output.parents}
    for name, column in columns.items():
        if len(column):
            raise CheckError(f"{len(column)} values of {name!r} for no row")


def _unicode(subject: Subject) -> None:
    def is_text(field: pa.Field[Any]) -> bool:
        return pa.types.is_string(field.type) and field.name not in _NOT_TEXTS

    for name in _columns(subject, is_text):
        texts = [ODD_TEXTS[number % len(ODD_TEXTS)] for number in range(subject.rows.num_rows)]
        _run_with(subject, name, pa.array(texts, subject.rows.schema.field(name).type), "odd texts")


def _missing(subject: Subject) -> None:
    for name in _columns(subject, lambda field: _may_be_missing(field.name, subject.kind)):
        holes = pa.array(np.arange(subject.rows.num_rows) % 2 == 0)
        column = subject.rows[name].combine_chunks()
        _run_with(
            subject, name, pc.if_else(holes, pa.nulls(len(column), column.type), column), "missing values"
        )


def _nan(subject: Subject) -> None:
    def may_be_nan(field: pa.Field[Any]) -> bool:
        return pa.types.is_floating(field.type) and _may_be_missing(field.name, subject.kind)

    for name in _columns(subject, may_be_nan):
        numbers = np.array(subject.rows[name].to_numpy(zero_copy_only=False), dtype=np.float64)
        numbers[::2] = np.nan
        _run_with(subject, name, pa.array(numbers, subject.rows.schema.field(name).type), "NaN")


def _may_be_missing(name: str, kind: RowKind) -> bool:
    table = TABLES["tasks" if kind == "task" else "experiences"]
    return name in MAY_BE_MISSING or (kind == "task" and name not in table.names)


def _columns(subject: Subject, wanted: Callable[[pa.Field[Any]], bool]) -> Iterator[str]:
    """Columns of a kind that the operator reads, or may read where it does not say."""
    reads = subject.build().reads or subject.rows.column_names
    names = [field.name for field in subject.rows.schema if field.name in reads and wanted(field)]
    if not names:
        raise SkipCheck("it reads no such column")
    yield from names


def _run_with(subject: Subject, name: str, column: pa.Array[Any], what: str) -> None:
    place = subject.rows.schema.get_field_index(name)
    try:
        subject.run(subject.rows.set_column(place, subject.rows.schema.field(place), column))
    except OperatorError as error:
        raise CheckError(f"{what} in {name!r}: {str(error).removeprefix('operators[0]: ')}") from error


def _declared(subject: Subject) -> None:
    """That it writes what it declares is checked by every run."""
    operator = subject.build()
    if not operator.reads:
        raise SkipCheck("it does not declare what it reads")
    declared = {*operator.reads, *_ALWAYS_READ, *operator.writes}
    read = [name for name in subject.rows.column_names if name in declared]
    _expect_same(subject.run(subject.rows), subject.run(subject.rows.select(read)), "without other columns")


def _same_twice(subject: Subject) -> None:
    operator = subject.build()
    _require_pure(operator)
    _expect_same(subject.run(subject.rows), subject.run(subject.rows), "built anew")
    if operator.pure:
        twice = subject.run(subject.rows, subject.rows)
        _expect_same(twice[: len(twice) // 2], twice[len(twice) // 2 :], "called again")


def _unchanged(subject: Subject) -> None:
    before = subject.rows.to_pydict()
    subject.run(subject.rows)
    after = subject.rows.to_pydict()
    if changed := [name for name in before if repr(before[name]) != repr(after[name])]:
        raise CheckError(f"it changes its input, in {', '.join(changed)}")


def _impure(operator: Operator) -> str:
    """Why two answers about the same rows may differ; empty where they may not."""
    if operator.pure or operator.keeps_state:
        return ""
    return "it asks a model" if operator.calls_model else "it declares that it is not pure"


def _require_pure(operator: Operator) -> None:
    if reason := _impure(operator):
        raise SkipCheck(reason)


def _row_order(subject: Subject) -> None:
    operator = subject.build()
    if operator.keeps_state or operator.whole_set:
        raise SkipCheck("it may treat the first of similar rows in another way")
    _require_pure(operator)
    turned = subject.rows.take(np.arange(subject.rows.num_rows)[::-1])
    _expect_same(subject.run(subject.rows), subject.run(turned), "in the opposite order")


def _batch_size(subject: Subject) -> None:
    operator = subject.build()
    _require_pure(operator)
    parts = parts_of(operator, subject.rows)
    if len(parts) == 1:
        raise SkipCheck("it gets all rows at once")
    _expect_same(subject.run(subject.rows), subject.run(*parts), f"in {len(parts)} parts")


def parts_of(operator: Operator, rows: pa.Table) -> list[pa.Table]:
    """The smallest tables that an operator may be called with: rows, groups, or all."""
    if operator.whole_set or operator.whole_steps:
        return [rows]
    if not operator.whole_groups:
        return [rows.slice(number, 1) for number in range(rows.num_rows)]
    groups = values_of(pc.unique(rows["group_id"]))
    return [rows.filter(pc.equal(rows["group_id"], pa.scalar(group))) for group in groups]


def _idempotent(subject: Subject) -> None:
    operator = subject.build()
    if not operator.idempotent:
        raise SkipCheck("it does not claim to be idempotent")
    with prepared([operator]):
        first = run_operators(
            [operator],
            subject.rows,
            row_kind=subject.kind,
            id_column=ID_COLUMNS[subject.kind],
            stage="test",
            step=1,
        )
    survivors = [result for result in subject.run(subject.rows) if result["kept"]]
    again = subject.run(first.survivors)
    for result in (*survivors, *again):
        # a column that it wrote is there the second time
        result["written"] = {name: result["written"].get(name) for name in operator.writes}
    _expect_same(survivors, again, "applied to its result")


PROPERTIES: dict[str, Callable[[Subject], object]] = {
    "no row": _empty,
    "one row": lambda subject: subject.run(subject.rows.slice(0, 1)),
    "unicode": _unicode,
    "missing values": _missing,
    "NaN": _nan,
    "declared columns": _declared,
    "same twice": _same_twice,
    "input unchanged": _unchanged,
    "row order": _row_order,
    "batch size": _batch_size,
    "idempotent": _idempotent,
}
"""In the order of the report."""
