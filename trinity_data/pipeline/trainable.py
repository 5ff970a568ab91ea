"""Rows that are never tried or trained: each is kept with a decision that says why.

No operator sees them, so they have no place among the operators.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from trinity_data.pipeline.runner import RowKind
from trinity_data.schema import rows_to_table

OPERATOR = "trainable"
"""Named in `decisions` like an operator."""


def decisions(reasons: Mapping[str, str], *, row_kind: RowKind, stage: str, step: int | None) -> pa.Table:
    """The `decisions` about rows that are left out: the reason by row id."""
    rows: list[dict[str, object]] = [
        {
            "row_kind": row_kind, "row_id": row_id, "stage": stage, "step": step, "operator": OPERATOR,
            "version": "1", "kept": False, "why": why,
        }
        for row_id, why in reasons.items()
    ]  # fmt: skip
    return rows_to_table("decisions", rows)
