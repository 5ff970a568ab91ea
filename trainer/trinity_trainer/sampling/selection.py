"""Choosing a batch from the run's store: the oldest rollouts, or those of the highest priority.

A batch is counted in rollouts and holds all rows of each, one a turn. A choice depends on the store,
the step and the run's seed alone; the cooldown of replay also on the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Protocol

import numpy as np

from trinity_data.config import ExperienceBufferConfig
from trinity_data.schema import group_of, rollout_of
from trinity_data.store.index import Candidate
from trinity_data.store.store import Store
from trinity_trainer.sampling.priority import Numbers, build_priority


class Selection(Protocol):
    """A way to choose."""

    def choose(self, step: int, *, through_step: int, size: int) -> list[str]:
        """Ids for the batch of `step`, of at most `size` rollouts,
        from rows made for steps up to `through_step`.
        """
        ...


class FifoSelection:
    """First in, first out."""

    def __init__(self, store: Store, stage: str, *, whole_groups: bool) -> None:
        self.store, self.stage, self.whole_groups = store, stage, whole_groups

    def choose(self, step: int, *, through_step: int, size: int) -> list[str]:
        del step
        waiting = self.store.pending(self.stage, through_step=through_step)
        return take(groups(waiting) if self.whole_groups else rollouts(waiting), size)


class PrioritySelection:
    """The highest priority first, and of equals the oldest.

    Rollouts may come again after `cooldown` seconds.
    """

    def __init__(
        self,
        store: Store,
        stage: str,
        buffer: ExperienceBufferConfig,
        *,
        max_staleness: int | None,
        seed: int,
        auxiliary: str = "",
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """With replay, the newest trained rollouts are candidates too, as many as `buffer` has capacity for.

        Rows that batches took from the buffer named `auxiliary` are left to it.
        """
        self.store, self.stage, self.whole_groups = store, stage, buffer.whole_groups
        self.priority = build_priority(buffer.replay_buffer)
        self.cooldown = buffer.replay_buffer.reuse_cooldown_time
        """Seconds before a trained row may come again; None: never."""
        self.num_used = 0 if self.cooldown is None else buffer.capacity
        self.max_staleness, self.seed, self.auxiliary, self.now = max_staleness, seed, auxiliary, now

    def choose(self, step: int, *, through_step: int, size: int) -> list[str]:
        candidates = self.store.candidates(self.stage, through_step=through_step, num_used=self.num_used)
        if self.auxiliary:
            candidates = [row for row in candidates if not row.experience_id.startswith(f"{self.auxiliary}/")]
        by_id = {row.experience_id: row for row in candidates}
        units = rollouts(by_id)
        versions = oldest_versions(self.store, units)
        uses = np.array([max(by_id[row].uses for row in rows) for rows in units], np.float64)
        draw = np.random.default_rng([self.seed, step])
        priorities = self.priority(np.nan_to_num(versions), uses, draw)
        resting = self._resting_rows(candidates)
        barred = np.array([not resting.isdisjoint(rows) for rows in units], bool)
        if self.max_staleness is not None:
            barred |= versions < step - 1 - self.max_staleness
        priorities = np.where(barred, np.nan, priorities)
        scores = {rollout_of(rows[0]): score for rows, score in zip(units, priorities.tolist(), strict=True)}
        if self.whole_groups:
            units = groups(row for rows in units for row in rows)
        # a group is as good as its best rollout; it stays out where one of them may not come
        unit_scores = np.array([np.max([scores[rollout_of(row)] for row in unit]) for unit in units])
        order = np.argsort(-unit_scores, kind="stable")
        return take([units[i] for i in order.tolist() if not np.isnan(unit_scores[i])], size)

    def _resting_rows(self, candidates: Iterable[Candidate]) -> set[str]:
        """Rows that were trained less than the cooldown ago.

        A step that a crash interrupted has no time yet.
        """
        if self.cooldown is None:
            return set()
        now = self.now()
        steps = self.store.table("steps", columns=["step", "started_at"]).to_pylist()
        rested = {row["step"] for row in steps if (now - row["started_at"]).total_seconds() >= self.cooldown}
        trained = (row for row in candidates if row.last_step is not None)
        return {row.experience_id for row in trained if row.last_step not in rested}


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
    chosen, taken = list[str](), 0
    for unit in units:
        more = num_rollouts(unit)
        if taken + more > size and (chosen or not size):
            break
        chosen += unit
        taken += more
    return chosen


def oldest_versions(store: Store, units: Sequence[Sequence[str]]) -> Numbers:
    """For each rollout the oldest version that made a turn of it; NaN where no engine sampled it."""
    ids = [row for rows in units for row in rows]
    if not ids:
        return np.zeros(0)
    column = store.read(ids, columns=["model_version"])["model_version"]
    versions = np.asarray(column.cast("float64").to_numpy(zero_copy_only=False), np.float64)
    starts = np.cumsum([0, *(len(rows) for rows in units[:-1])])
    return np.asarray(np.fmin.reduceat(versions, starts), np.float64)


def _together(ids: Iterable[str], unit_of: Callable[[str], str]) -> list[list[str]]:
    by_unit: dict[str, list[str]] = {}
    for row in ids:
        by_unit.setdefault(unit_of(row), []).append(row)
    return list(by_unit.values())
