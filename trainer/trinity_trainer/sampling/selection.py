"""Choosing a batch from the run's store: the oldest rollouts, or those of the highest priority.

A batch is counted in rollouts and holds all rows of each, one a turn. A choice depends on the store,
the step and the run's seed alone; the cooldown of replay also on the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Protocol

import numpy as np

from trinity_data.schema import group_of, rollout_of
from trinity_data.store.index import Candidate
from trinity_data.store.store import Store
from trinity_trainer.sampling.priority import Numbers, Priority


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
        priority: Priority,
        *,
        cooldown: float | None,
        num_used: int,
        max_staleness: int | None,
        whole_groups: bool,
        seed: int,
        auxiliary: str = "",
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`num_used` is how many rollouts that were trained are looked at, the newest.

        A `cooldown` of None is no replay. Rows that batches took from the buffer named
        `auxiliary` are left to it.
        """
        self.store, self.stage, self.priority, self.cooldown = store, stage, priority, cooldown
        self.num_used = 0 if cooldown is None else num_used
        self.max_staleness, self.whole_groups = max_staleness, whole_groups
        self.seed, self.auxiliary, self.now = seed, auxiliary, now

    def choose(self, step: int, *, through_step: int, size: int) -> list[str]:
        found = self.store.candidates(self.stage, through_step=through_step, num_used=self.num_used)
        if self.auxiliary:
            found = [row for row in found if not row.experience_id.startswith(f"{self.auxiliary}/")]
        known = {row.experience_id: row for row in found}
        tries = rollouts(known)
        versions = oldest_versions(self.store, tries)
        uses = np.array([max(known[row].uses for row in rows) for rows in tries], np.float64)
        draw = np.random.default_rng([self.seed, step])
        priorities = self.priority(np.nan_to_num(versions), uses, draw)
        rested = self._rested_steps()
        barred = np.array([any(self._rests(known[row], rested) for row in rows) for rows in tries], bool)
        if self.max_staleness is not None:
            barred |= versions < step - 1 - self.max_staleness
        return take(self._ranked(tries, np.where(barred, np.nan, priorities)), size)

    def _rests(self, row: Candidate, rested: set[int]) -> bool:
        """Whether it was trained too short a time ago to come again."""
        return self.cooldown is not None and row.last_step is not None and row.last_step not in rested

    def _rested_steps(self) -> set[int]:
        """Those whose rows may come again; a step that a crash cut short has no time yet."""
        if self.cooldown is None:
            return set()
        now, cooldown = self.now(), self.cooldown
        times = _reading_times(self.store).items()
        return {step for step, read_at in times if (now - read_at).total_seconds() >= cooldown}

    def _ranked(self, tries: list[list[str]], priorities: Numbers) -> list[list[str]]:
        """Rollouts or groups, best first.

        A group is as good as its best one; it stays out where one may not come.
        """
        known = {
            rollout_of(rows[0]): priority for rows, priority in zip(tries, priorities.tolist(), strict=True)
        }
        units = groups(row for rows in tries for row in rows) if self.whole_groups else tries
        scored = [[known[rollout_of(row)] for row in unit] for unit in units]
        scores = np.array([max(each) for each in scored])
        barred = np.array([bool(np.isnan(each).any()) for each in scored], bool)
        order = np.argsort(-scores, kind="stable")
        return [units[i] for i in order.tolist() if not barred[i]]


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


def oldest_versions(store: Store, tries: Sequence[Sequence[str]]) -> Numbers:
    """For each rollout the oldest version that made a turn of it; NaN where nobody sampled it."""
    ids = [row for rows in tries for row in rows]
    if not ids:
        return np.zeros(0)
    column = store.read(ids, columns=["model_version"])["model_version"]
    versions = np.asarray(column.cast("float64").to_numpy(zero_copy_only=False), np.float64)
    starts = np.cumsum([0, *(len(rows) for rows in tries[:-1])])
    return np.asarray(np.fmin.reduceat(versions, starts), np.float64)


def _together(ids: Iterable[str], unit_of: Callable[[str], str]) -> list[list[str]]:
    found: dict[str, list[str]] = {}
    for row in ids:
        found.setdefault(unit_of(row), []).append(row)
    return list(found.values())


def _reading_times(store: Store) -> dict[int, datetime]:
    """When each step read its batch."""
    rows = store.table("steps", columns=["step", "started_at"]).to_pylist()
    return {row["step"]: row["started_at"] for row in rows}
