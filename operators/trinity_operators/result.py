"""What a chain of operators made of a table, and the rows of `outcomes` about it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trinity_data.schema import OUTCOMES
from trinity_operators.base import Bools, Floats, choose_reason
from trinity_operators.counts import OperatorCount

_BLOCK = 1024


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
        "stage": same_text(stage, rows.num_rows),
        "step": pa.repeat(pa.scalar(step, pa.int64()), rows.num_rows),
        "reward": nullable(result.values.get("reward", no_numbers)),
        "advantage": nullable(result.values.get("advantage", no_numbers)),
        "scores": scores_column(result),
        "kept": pa.array(result.kept),
        "dropped_by": result.dropped_by,
        **result.tokens,
    }
    nulls = {
        field.name: pa.nulls(rows.num_rows, field.type) for field in OUTCOMES if field.name not in columns
    }
    return pa.table(columns | nulls).select(OUTCOMES.names).cast(OUTCOMES)


def nullable(numbers: Floats) -> pa.Array[Any]:
    return pa.array(numbers, type=pa.float64(), from_pandas=True)


def same_text(text: str, num_rows: int) -> pa.Array[Any]:
    return _block(text).slice(0, num_rows) if num_rows <= _BLOCK else pa.repeat(text, num_rows)


@lru_cache(maxsize=1024)
def _block(text: str) -> pa.Array[Any]:
    """Made once a text: small tables come by the thousand, and a slice costs a tenth of a new array."""
    return pa.repeat(text, _BLOCK)
