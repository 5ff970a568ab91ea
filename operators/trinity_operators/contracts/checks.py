"""What each check of a contract measures in the rows of a step, and which rows are behind a breach.

`recomputation` is not here: it runs reward functions (trinity_explorer.recomputation).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.config import ContractConfig
from trinity_data.errors import OperatorError
from trinity_data.schema import Values, group_of
from trinity_operators.base import Bools, Floats
from trinity_operators.contracts.drift import MEASURES, standard_errors_apart
from trinity_operators.contracts.step_rows import GROUP_TEXT, Sample, StepRows

ID = "experience_id"


@dataclass(frozen=True)
class Measured:
    """What a check found in a step."""

    value: float | None
    """Compared with the bounds of the contract; of a check of single rows, how many break it.

    None where there was nothing to measure.
    """
    what: str
    """The value in words."""
    is_broken: bool
    rows: Sequence[str] = ()
    """Ids of those behind a breach."""


SampleOf = Callable[[str, int], Sample]
"""The numbers of a column in a step."""
CheckFunction = Callable[[ContractConfig, StepRows, SampleOf], Measured]


def outside(value: float, bounds: tuple[float | None, float | None]) -> bool:
    """Whether a value breaks its bounds; no number does."""
    low, high = bounds
    return bool(np.isnan(value) or (low is not None and value < low) or (high is not None and value > high))


def shown_bounds(bounds: tuple[float | None, float | None]) -> str:
    low, high = bounds
    if low is not None and high is not None:
        return f"{low:g}" if low == high else f"{low:g} to {high:g}"
    return f"at least {low:g}" if low is not None else f"at most {high:g}"


def values_in_range(contract: ContractConfig, rows: StepRows, sample_of: SampleOf) -> Measured:
    assert contract.column is not None
    numbers = rows.numbers(contract.column)
    return _of_rows(
        rows, _outside_bounds(numbers, contract), f"have {contract.column} outside", numbers, contract
    )


def values_not_null(contract: ContractConfig, rows: StepRows, sample_of: SampleOf) -> Measured:
    assert contract.column is not None
    is_missing = missing(rows.values(contract.column))
    return _of_rows(rows, is_missing, f"have {contract.column} that is null, NaN or infinite")


def no_contamination(contract: ContractConfig, rows: StepRows, sample_of: SampleOf) -> Measured:
    shares = rows.contamination()
    what = "have tasks with a contamination outside"
    return _of_rows(rows, _outside_bounds(shares, contract), what, shares, contract)


def duplicates(contract: ContractConfig, rows: StepRows, sample_of: SampleOf) -> Measured:
    """Rows that repeat another one of their group, the first of each kind not counted."""
    column = contract.column or GROUP_TEXT
    seen: set[tuple[str, str]] = set()
    repeats = []
    for row, text in zip(rows.ids, rows.texts(column), strict=True):
        key = (group_of(row), text)
        if key in seen:
            repeats.append(row)
        seen.add(key)
    share = len(repeats) / len(rows.ids) if rows.ids else None
    return _of_step(share, contract, f"share of rows that repeat a {column} of their group", repeats)


def percentile(contract: ContractConfig, rows: StepRows, sample_of: SampleOf) -> Measured:
    assert contract.column is not None
    numbers = rows.numbers(contract.column)
    known = numbers[~np.isnan(numbers)]
    value = float(np.percentile(known, contract.percentile)) if len(known) else None
    what = f"percentile {contract.percentile:g} of {contract.column}"
    return _of_step(value, contract, what, _chosen(rows, _outside_bounds(numbers, contract)))


def drift(contract: ContractConfig, rows: StepRows, sample_of: SampleOf) -> Measured:
    assert contract.column is not None
    now = sample_of(contract.column, rows.step)
    earlier = [sample_of(contract.column, rows.step - back) for back in range(contract.steps, 0, -1)]
    what = f"{contract.measure} of {contract.column} against {contract.steps} steps before"
    if not all(len(each.numbers_N) for each in (now, *earlier)):
        return Measured(None, f"{what}: not so many rows yet", False)
    before = Sample.of_all(earlier)
    value = MEASURES[contract.measure](now.numbers_N, before.numbers_N)
    text = f"{what}: {value:.4g}, allowed is {shown_bounds(contract.bounds)} either way"
    # a fall is as much of a jump as a rise
    is_broken = outside(abs(value), contract.bounds)
    if contract.standard_errors:
        errors = standard_errors_apart(now.means_G, before.means_G)
        # no number is no chance
        is_broken = is_broken and not abs(errors) < contract.standard_errors
        text += f", and any within {contract.standard_errors:g} standard errors; these are {errors:.3g}"
    return Measured(value, text, is_broken, rows.ids if is_broken else ())


def kept_share(contract: ContractConfig, rows: StepRows, sample_of: SampleOf) -> Measured:
    assert contract.operator is not None
    rows_in, rows_out = rows.rows_in_and_out(contract.operator)
    share = rows_out / rows_in if rows_in else None
    return _of_step(share, contract, f"share of rows that {contract.operator} kept", rows.ids)


def query(contract: ContractConfig, rows: StepRows, sample_of: SampleOf) -> Measured:
    assert contract.sql is not None
    value, found = answer_of(rows.query(contract.sql))
    known = {*rows.ids}
    if unknown := [row for row in found if row not in known]:
        raise OperatorError(
            f"the query gives {unknown[0]!r}, which is no row of the step: select from step_rows"
        )
    return _of_step(value, contract, "the query's rows" if found else "the query's number", found)


def answer_of(answer: pa.Table) -> tuple[float | None, list[str]]:
    """The number that a query gives, and the rows that it names. Raises OperatorError for another answer."""
    if ID in answer.column_names:
        found: list[Any] = pc.unique(answer[ID]).to_pylist()
        return float(len(found)), found
    kinds = [answer.schema.field(number).type for number in range(answer.num_columns)]
    is_number = [any(test(kind) for test in _NUMBERS) for kind in kinds]
    if is_number != [True] or answer.num_rows > 1:
        shape = f"{answer.num_rows} rows of {', '.join(answer.column_names)}"
        raise OperatorError(f"the query gives {shape}; allowed are one number, or rows with {ID}")
    value = answer[0][0].as_py() if answer.num_rows else None
    return (None if value is None else float(value)), []


def missing(values: Values) -> Bools:
    """Null, NaN and infinite ones, and lists that are or have such."""
    array: Any = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    is_missing = np.asarray(pc.is_null(array).to_numpy(zero_copy_only=False), np.bool_)
    if pa.types.is_list(array.type):
        parents = pc.list_parent_indices(array).to_numpy()
        is_missing[parents[missing(array.flatten())]] = True
    elif pa.types.is_floating(array.type):
        is_missing |= ~np.isfinite(array.cast(pa.float64()).to_numpy(zero_copy_only=False))
    return is_missing


def _outside_bounds(numbers: Floats, contract: ContractConfig) -> Bools:
    """A missing number breaks none: that is what `not_null` is for."""
    low, high = contract.bounds
    below = np.zeros(len(numbers), np.bool_) if low is None else numbers < low
    return below if high is None else below | (numbers > high)


def _chosen(rows: StepRows, is_one: Bools) -> list[str]:
    return [row for row, is_chosen in zip(rows.ids, is_one, strict=True) if is_chosen]


def _of_rows(
    rows: StepRows,
    is_bad: Bools,
    what: str,
    numbers: Floats | None = None,
    contract: ContractConfig | None = None,
) -> Measured:
    bad = _chosen(rows, is_bad)
    bounds = "" if contract is None else f" {shown_bounds(contract.bounds)}"
    text = f"{len(bad)} of {len(rows.ids)} rows {what}{bounds}"
    if bad:
        first = "" if numbers is None else f" with {numbers[is_bad][0]:g}"
        text += f", such as {bad[0]}{first}"
    return Measured(float(len(bad)), text, bool(bad), bad)


def _of_step(value: float | None, contract: ContractConfig, what: str, rows: Sequence[str]) -> Measured:
    if value is None:
        return Measured(None, f"{what}: nothing to measure", False)
    is_broken = outside(value, contract.bounds)
    text = f"{what}: {value:.4g}, allowed is {shown_bounds(contract.bounds)}"
    return Measured(value, text, is_broken, rows if is_broken else ())


_NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean)

CHECKS: dict[str, CheckFunction] = {
    "contamination": no_contamination,
    "drift": drift,
    "duplicates": duplicates,
    "kept_share": kept_share,
    "not_null": values_not_null,
    "percentile": percentile,
    "range": values_in_range,
    "sql": query,
}
