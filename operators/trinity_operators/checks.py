"""What an operator returned, checked: its length, its types, and that it is what the operator declares."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.errors import OperatorError, did_you_mean
from trinity_data.schema import OUTCOMES
from trinity_operators.base import Column, Floats, Operator, float_column

FIXED_COLUMNS = frozenset({"task_id", "experience_id", "group_id", "token_ids", "logprobs", "action_mask"})
"""What joins the tables and what was sampled: no operator may write these."""

TOKEN_COLUMNS = ("token_rewards", "token_advantages")
"""Of an experience: a number for each token of its response."""

_IDS = ("experience_id", "task_id")


def as_array(values: pa.Array[Any] | npt.NDArray[Any] | Sequence[Any]) -> pa.Array[Any]:
    """As pyarrow infers the type, which its stubs would have to know."""
    untyped: Any = values
    array: pa.Array[Any] = pa.array(untyped)
    return array


def numbers_of(operator: Operator, name: str, column: Column, num_rows: int) -> Floats:
    array = as_array(column) if isinstance(column, Sequence) else column
    check_length(operator, name, len(array), num_rows)
    if not isinstance(array, np.ndarray):
        if not (pa.types.is_null(array.type) or pa.types.is_primitive(array.type)) or pa.types.is_temporal(
            array.type
        ):
            raise OperatorError(f"{operator.label!r}: {name!r} must hold floats, found {array.type}")
        array = array.cast(pa.float64()).to_numpy(zero_copy_only=False)
    if array.ndim != 1 or array.dtype.kind not in "fiub":
        raise OperatorError(
            f"{operator.label!r}: {name!r} must hold floats, found {array.dtype} of {array.ndim} dimensions"
        )
    return array.astype(np.float64)


def as_recorded(rows: pa.Table, name: str | None) -> Floats:
    """What decisions say of a column: its numbers, or the length of its texts."""
    if name is None or rows.schema.get_field_index(name) < 0:
        return np.full(rows.num_rows, np.nan)
    column = rows[name]
    if name in TOKEN_COLUMNS:
        return np.full(rows.num_rows, np.nan)
    if not pa.types.is_floating(column.type):
        column = pc.utf8_length(column)
    return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.float64)


def check_finite(operator: Operator, name: str, numbers: Floats, rows: pa.Table) -> None:
    """A reward or an advantage is a number, unless the row had no reward:
    NaN would be trained as one or be lost.
    """
    if name not in ("reward", "advantage") or np.isfinite(numbers).all():
        return
    is_wrong = ~np.isfinite(numbers)
    if rows.schema.get_field_index("reward") >= 0:
        rewards = np.asarray(rows["reward"].to_numpy(zero_copy_only=False), dtype=np.float64)
        is_wrong &= ~(np.isnan(numbers) & np.isnan(rewards))
    if is_wrong.any():
        number = int(np.flatnonzero(is_wrong)[0])
        id_column = next(key for key in (*_IDS, rows.schema.names[0]) if key in rows.schema.names)
        raise OperatorError(
            f"{operator.label!r} wrote {float(numbers[number])!r} as {name!r} of "
            f"{rows[id_column][number].as_py()!r} "
            f"({int(is_wrong.sum())} of {len(numbers)} rows); a number is wanted: write one, "
            "or drop the row with a filter before"
        )


def token_values(operator: Operator, name: str, column: Column, rows: pa.Table) -> pa.Array[Any]:
    """A column of `TOKEN_COLUMNS`: a list for each row, as long as its response, or null."""
    if "response_length" not in rows.column_names:
        raise OperatorError(f"{operator.label!r} writes {name!r}, which only experiences have")
    untyped: Any = column
    array = untyped.combine_chunks() if isinstance(column, pa.ChunkedArray) else pa.array(untyped)
    check_length(operator, name, len(array), rows.num_rows)
    if not (pa.types.is_list(array.type) or pa.types.is_null(array.type)):
        raise OperatorError(f"{operator.label!r}: {name!r} must hold lists of floats, found {array.type}")
    lists: Any = array.cast(OUTCOMES.field(name).type)
    lengths = lists.value_lengths().to_numpy(zero_copy_only=False)
    is_wrong = ~np.isnan(lengths) & (lengths != float_column(rows, "response_length"))
    if is_wrong.any():
        number = int(np.flatnonzero(is_wrong)[0])
        raise OperatorError(
            f"{operator.label!r} wrote {int(lengths[number])} {name} for "
            f"{rows['response_length'][number].as_py()} response tokens of "
            f"{rows['experience_id'][number].as_py()!r}"
        )
    if not np.isfinite(lists.flatten().to_numpy(zero_copy_only=False)).all():
        raise OperatorError(f"{operator.label!r} wrote {name} that are not finite")
    values: pa.Array[Any] = lists
    return values


def check_length(operator: Operator, what: str, num_values: int, num_rows: int) -> None:
    if num_values != num_rows:
        raise OperatorError(
            f"{operator.label!r} returned {num_values} values of {what!r} for {num_rows} rows"
        )


def check_written(operator: Operator, names: Collection[str], rows: pa.Table) -> None:
    missing_names = set(operator.writes) - set(names)
    extra_names = set() if operator.writes_more else set(names) - set(operator.writes)
    if missing_names or extra_names:
        declared_list, returned_list = (", ".join(each) or "nothing" for each in (operator.writes, names))
        raise OperatorError(
            f"{operator.label!r} declares that it writes {declared_list}, but returned {returned_list}"
        )
    for name in names:
        if name in FIXED_COLUMNS:
            raise OperatorError(f"{operator.label!r} writes {name!r}, which no operator may change")
        position = rows.schema.get_field_index(name)
        if position < 0 or name in TOKEN_COLUMNS:
            continue
        kind = rows.schema.field(position).type
        if not (pa.types.is_floating(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            what = f"a column of {kind}; only floats and text change"
            raise OperatorError(f"{operator.label!r} writes {name!r}, {what}")


def written_columns(operator: Operator, results: Sequence[Any]) -> dict[str, list[Any]]:
    """The columns of what an operator returned for each row: a dict, or the value of the only column."""
    columns: dict[str, list[Any]] = {name: [] for name in operator.writes}
    for result in results:
        values = result if isinstance(result, Mapping) else {only_column(operator, repr(result)): result}
        if values.keys() != columns.keys():
            names = ", ".join(map(repr, values)) or "nothing"
            raise OperatorError(
                f"{operator.name!r} returned {names} for a row; it declares {', '.join(operator.writes)}"
            )
        for name, value in values.items():
            columns[name].append(value)
    return columns


def only_column(operator: Operator, returned: str) -> str:
    """The column that a single value belongs to."""
    if len(operator.writes) != 1:
        raise OperatorError(
            f"{operator.name!r} returned {returned}; it writes {', '.join(operator.writes)}: "
            "return a dict of these"
        )
    return operator.writes[0]


def check_columns(operators: Sequence[Operator], columns: Collection[str]) -> None:
    """Refuse, before anything runs, an operator that reads what neither the rows nor an
    earlier operator offers.
    """
    for position, text in column_problems(operators, columns):
        raise OperatorError(f"operators[{position}]: {text}")


def column_problems(operators: Sequence[Operator], columns: Collection[str]) -> Iterator[tuple[int, str]]:
    """Every column that an operator reads and nobody offers, and every one that it writes and may not,
    with the operator's position.
    """
    names = set(columns)
    for position, operator in enumerate(operators):
        if not any(earlier.writes_more for earlier in operators[:position]):
            for name in operator.reads:
                if name not in names:
                    yield position, missing_column(operator, name, names)
        for name in operator.writes:
            if name in FIXED_COLUMNS:
                yield position, f"{operator.label!r} writes {name!r}, which no operator may change"
        names.update(operator.writes)


def missing_column(operator: Operator, name: str, columns: Collection[str]) -> str:
    return (
        f"{operator.label!r} reads column {name!r}, which is not there; "
        f"there are: {', '.join(sorted(columns))}{did_you_mean(name, columns)}"
    )
