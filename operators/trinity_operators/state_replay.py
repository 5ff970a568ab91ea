"""Operators that keep state, after a restart: the rows that they saw are replayed, in the same order,
through the same operators.

An operator whose result follows from its rows continues as if nothing had happened; one with another result
than the stored one is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from trinity_data.errors import OperatorError
from trinity_data.schema import values_of
from trinity_operators.base import Operator
from trinity_operators.calls import Watch
from trinity_operators.runner import RowKind, run_operators


def stateful_part(operators: Sequence[Operator]) -> Sequence[Operator]:
    """The operators up to the last one that keeps state; empty where none does."""
    ends = [number for number, operator in enumerate(operators, 1) if operator.keeps_state]
    return operators[: max(ends, default=0)]


def replay_state(
    operators: Sequence[Operator],
    rows: pa.Table,
    dropped_by: Sequence[str],
    *,
    row_kind: RowKind,
    stage: str,
    watch: Watch | None = None,
) -> None:
    """Passes stored rows through the stateful part of a pipeline; the result is not stored again.

    `dropped_by` holds the operator that dropped each row, or "". Raises OperatorError where it is another
    one now.
    """
    part = stateful_part(operators)
    id_column = f"{row_kind}_id"
    result = run_operators(
        part, rows, row_kind=row_kind, id_column=id_column, stage=stage, step=None, watch=watch
    )
    replayed = {operator.label for operator in part}
    later = {operator.label for operator in operators[len(part) :]}
    # rows that an expander makes are made of these and stand behind them
    now_dropped_by = values_of(result.dropped_by.slice(0, rows.num_rows))
    for number, (before, now) in enumerate(zip(dropped_by, now_dropped_by, strict=True)):
        passed = before not in replayed or before in later
        if now != before and not (passed and now == ""):
            row_id = rows[id_column][number].as_py()
            raise OperatorError(
                f"a resume cannot go on as the run would have: {row_kind} {row_id!r} was "
                f"{_outcome(before)} when it was read and is {_outcome(now)} now. "
                f"An operator up to {part[-1].label!r}, which "
                "keeps state, does not give the same result for the same rows; make it do so, put it behind, "
                "or begin a new run"
            )


def _outcome(label: str) -> str:
    return f"dropped by {label!r}" if label else "kept"
