"""Batches of what the explorer makes: when a step's batch is formed, and from which rows that wait.

A batch is counted in rollouts and holds all rows of each, one a turn. A choice depends on the store,
the step and the run's seed alone; the cooldown of replay also on the clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trinity_data.schema import group_of, rollout_of, rows_to_table
from trinity_data.store.protocol import WritableStore
from trinity_data.store.types import Commit, State
from trinity_data.synchronizer import Synchronizer

STALENESS_OPERATOR = "max_staleness"
"""Named in `decisions` like an operator."""

Numbers = npt.NDArray[np.float64]


class BatchSampler(Protocol):
    """Where the experiences of a step come from."""

    async def next(self, step: int) -> list[str] | None:
        """Ids for `step` in training order.

        An empty list when operators dropped them all, None at the end.
        """
        ...


class Selection(Protocol):
    """A way to choose: the oldest rollouts, or those of the highest priority."""

    def choose(self, step: int, *, through_step: int, size: int) -> list[str]:
        """Ids for the batch of `step`, of at most `size` rollouts,
        from rows made for steps up to `through_step`.
        """
        ...


class ExploredSampler:
    """Kept experiences, once the explorer has finished the step."""

    def __init__(
        self,
        store: WritableStore,
        synchronizer: Synchronizer,
        selection: Selection,
        *,
        stage: str,
        train_batch_size: int,
        max_read_timeout: float | None,
        max_staleness: int | None = None,
        whole_groups: bool = False,
    ) -> None:
        """Without `max_read_timeout` a batch waits until its step is explored to the end."""
        self.store, self.synchronizer, self.selection, self.stage = store, synchronizer, selection, stage
        self.train_batch_size, self.max_read_timeout = train_batch_size, max_read_timeout
        self.max_staleness, self.whole_groups = max_staleness, whole_groups

    async def next(self, step: int) -> list[str] | None:
        """After `max_read_timeout` seconds the batch is what there is by then, if there is anything."""
        while True:
            try:
                explored = self.synchronizer.wait_explored(step)
                if not await asyncio.wait_for(explored, self.max_read_timeout):
                    return None
                # below `step` when so many rows wait that the explorer does not go on
                through_step = min(step, self.synchronizer.explored)
                break
            except TimeoutError:
                through_step = step
                if self.store.pending(self.stage, through_step=step, limit=1):
                    break
        if self.max_staleness is not None:
            await self.mark_stale(step, self.max_staleness, through_step=through_step)
        return self.selection.choose(step, through_step=through_step, size=self.train_batch_size)

    async def mark_stale(self, step: int, max_staleness: int, *, through_step: int) -> None:
        """Pending rollouts become stale that have a turn more than `max_staleness` versions older than what
        `step` trains, and with `whole_groups` the rest of their groups: each row with a decision.
        """
        oldest_version = step - 1 - max_staleness
        pending = self.store.pending(self.stage, through_step=through_step)
        units = rollouts(pending)
        with_versions = list(zip(units, oldest_versions(self.store, units).tolist(), strict=True))
        versions = {row: version for rows, version in with_versions for row in rows}
        unit_of = group_of if self.whole_groups else rollout_of
        stale_units = {unit_of(rows[0]) for rows, version in with_versions if version < oldest_version}
        stale = [row for row in pending if unit_of(row) in stale_units]
        if not stale:
            return
        steps = self.store.read(stale, columns=["step"])["step"].to_pylist()
        reason = f"older than {max_staleness} model version(s) when step {step} was to train version "
        reason += str(step - 1)
        decisions: list[dict[str, object]] = [
            {
                "row_kind": "experience", "row_id": row, "stage": self.stage, "step": made_for,
                "operator": STALENESS_OPERATOR, "version": "1", "kept": False, "reason": reason,
                "value_before": None if np.isnan(versions[row]) else versions[row],
                "value_after": float(oldest_version),
            }
            for row, made_for in zip(stale, steps, strict=True)
        ]  # fmt: skip
        table = rows_to_table("decisions", decisions)
        commit = Commit(tables={"decisions": table}, states=[(row, State.STALE) for row in stale])
        message = f"{num_rollouts(stale)} rollouts ({len(stale)} rows) {reason}"
        await asyncio.wrap_future(self.store.log_event(self.stage, step, "stale", message, commit=commit))


class FifoSelection:
    """First in, first out."""

    def __init__(self, store: WritableStore, stage: str, *, whole_groups: bool) -> None:
        self.store, self.stage, self.whole_groups = store, stage, whole_groups

    def choose(self, step: int, *, through_step: int, size: int) -> list[str]:
        del step
        pending = self.store.pending(self.stage, through_step=through_step)
        return take(groups(pending) if self.whole_groups else rollouts(pending), size)


def rollouts(ids: Iterable[str]) -> list[list[str]]:
    """The rows of each rollout together, one a turn, in the order of their first rows."""
    return _together(ids, rollout_of)


def groups(ids: Iterable[str]) -> list[list[str]]:
    """The rows of each group together, in the order of their first rows."""
    return _together(ids, group_of)


def num_rollouts(ids: Iterable[str]) -> int:
    """How many rollouts these rows belong to."""
    return len({rollout_of(row) for row in ids})


def take(units: Iterable[list[str]], size: int) -> list[str]:
    """Whole units in their order while `size` rollouts hold them; one that is larger is a batch by itself."""
    ids, num_taken = list[str](), 0
    for unit in units:
        num_more = num_rollouts(unit)
        if num_taken + num_more > size and (ids or not size):
            break
        ids += unit
        num_taken += num_more
    return ids


def oldest_versions(store: WritableStore, units: Sequence[Sequence[str]]) -> Numbers:
    """For each rollout the oldest version that made a turn of it; NaN where no engine sampled it."""
    ids = [row for rows in units for row in rows]
    if not ids:
        return np.zeros(0)
    column = store.read(ids, columns=["model_version"])["model_version"]
    versions = np.asarray(column.cast(pa.float64()).to_numpy(zero_copy_only=False), np.float64)
    starts = np.cumsum([0, *(len(rows) for rows in units[:-1])])
    return np.asarray(np.fmin.reduceat(versions, starts), np.float64)


def _together(ids: Iterable[str], unit_of: Callable[[str], str]) -> list[list[str]]:
    by_unit: dict[str, list[str]] = {}
    for row in ids:
        by_unit.setdefault(unit_of(row), []).append(row)
    return list(by_unit.values())
