"""Rollouts that wait and have become too old to train: each row goes stale,
with a decision that says by how much.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

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

    How many rows went. With `whole_groups` the rest of their groups goes with them.
    """
    trained, oldest = step - 1, step - 1 - max_staleness
    waiting = store.pending(stage, through_step=through_step)
    tries = rollouts(waiting)
    made_by = oldest_versions(store, tries)
    versions = {row: version for rows, version in zip(tries, made_by.tolist(), strict=True) for row in rows}
    unit_of = group_of if whole_groups else rollout_of
    torn = {unit_of(rows[0]) for rows, version in zip(tries, made_by, strict=True) if version < oldest}
    stale = [row for row in waiting if unit_of(row) in torn]
    if not stale:
        return 0
    steps = store.read(stale, columns=["step"])["step"].to_pylist()
    why = f"older than {max_staleness} model version(s) when step {step} was to train version {trained}"
    decisions: list[dict[str, object]] = [
        {
            "row_kind": "experience", "row_id": row, "stage": stage, "step": made_for, "operator": OPERATOR,
            "version": "1", "kept": False, "reason": why,
            "value_before": None if np.isnan(versions[row]) else versions[row], "value_after": float(oldest),
        }
        for row, made_for in zip(stale, steps, strict=True)
    ]  # fmt: skip
    event: dict[str, object] = {
        "at": datetime.now(UTC),
        "stage": stage,
        "step": step,
        "kind": "stale",
        "message": f"{num_rollouts(stale)} rollouts ({len(stale)} rows) {why}",
    }
    tables = {
        "decisions": rows_to_table("decisions", decisions),
        "events": rows_to_table("events", [event]),
    }
    commit = Commit(tables=tables, states=[(row, State.STALE) for row in stale])
    await asyncio.wrap_future(store.submit(commit))
    return len(stale)
