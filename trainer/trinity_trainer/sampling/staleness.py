"""Rollouts that are pending and have become too old to train: each row becomes stale,
with a decision that says by how much.
"""

from __future__ import annotations

import asyncio

import numpy as np

from trinity_data.schema import group_of, rollout_of, rows_to_table
from trinity_data.store.store import Store
from trinity_data.store.types import Commit, State
from trinity_trainer.sampling.selection import num_rollouts, oldest_versions, rollouts

OPERATOR = "max_staleness"
"""Named in `decisions` like an operator."""


async def mark_stale(
    store: Store, stage: str, step: int, *, max_staleness: int, through_step: int, whole_groups: bool
) -> int:
    """Rollouts with a turn older than the version that `step` trains by more than `max_staleness`.

    Returns how many rows became stale; with `whole_groups` the rest of their groups does too.
    """
    trained, oldest = step - 1, step - 1 - max_staleness
    pending = store.pending(stage, through_step=through_step)
    units = rollouts(pending)
    with_versions = list(zip(units, oldest_versions(store, units).tolist(), strict=True))
    versions = {row: version for rows, version in with_versions for row in rows}
    unit_of = group_of if whole_groups else rollout_of
    stale_units = {unit_of(rows[0]) for rows, version in with_versions if version < oldest}
    stale = [row for row in pending if unit_of(row) in stale_units]
    if not stale:
        return 0
    steps = store.read(stale, columns=["step"])["step"].to_pylist()
    reason = f"older than {max_staleness} model version(s) when step {step} was to train version {trained}"
    decisions: list[dict[str, object]] = [
        {
            "row_kind": "experience", "row_id": row, "stage": stage, "step": made_for, "operator": OPERATOR,
            "version": "1", "kept": False, "reason": reason,
            "value_before": None if np.isnan(versions[row]) else versions[row], "value_after": float(oldest),
        }
        for row, made_for in zip(stale, steps, strict=True)
    ]  # fmt: skip
    commit = Commit(
        tables={"decisions": rows_to_table("decisions", decisions)},
        states=[(row, State.STALE) for row in stale],
    )
    message = f"{num_rollouts(stale)} rollouts ({len(stale)} rows) {reason}"
    await asyncio.wrap_future(store.log_event(stage, step, "stale", message, commit=commit))
    return len(stale)
