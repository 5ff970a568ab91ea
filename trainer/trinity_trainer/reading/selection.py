"""Choosing a batch from the run's store: the oldest rows, or those of the highest priority.

A choice depends on the store, the step and the run's seed alone; the cooldown of replay also on the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Protocol

import numpy as np

from trinity_data.schema import group_of
from trinity_data.store.store import Store
from trinity_data.store.uses import Candidate
from trinity_trainer.reading.priority import Numbers, Priority


class Selection(Protocol):
    """A way to choose."""

    def choose(self, step: int, *, through_step: int, size: int) -> list[str]:
        """Ids for the batch of `step`, at most `size`, from rows made for steps up to `through_step`."""
        ...


class OldestFirst:
    """First in, first out."""

    def __init__(self, store: Store, stage: str, *, whole_groups: bool) -> None:
        self.store, self.stage, self.whole_groups = store, stage, whole_groups

    def choose(self, step: int, *, through_step: int, size: int) -> list[str]:
        del step
        if not self.whole_groups:
            return self.store.pending(self.stage, through_step=through_step, limit=size)
        return take(groups(self.store.pending(self.stage, through_step=through_step)), size)


class ByPriority:
    """The highest priority first, and of equals the oldest; rows may come again after `cooldown` seconds."""

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
        """`num_used` is how many rows that were trained are looked at, the newest; a `cooldown` of None is no replay.

        Rows that batches took from the buffer named `auxiliary` are left to it.
        """
        self.store, self.stage, self.priority, self.cooldown = store, stage, priority, cooldown
        self.num_used = 0 if cooldown is None else num_used
        self.max_staleness, self.whole_groups = max_staleness, whole_groups
        self.seed, self.auxiliary, self.now = seed, auxiliary, now

    def choose(self, step: int, *, through_step: int, size: int) -> list[str]:
        found = self.store.candidates(self.stage, through_step=through_step, num_used=self.num_used)
        if self.auxiliary:
            found = [row for row in found if not row.experience_id.startswith(f"{self.auxiliary}/")]
        ready = self._cooled(found)
        versions = model_versions(self.store, [row.experience_id for row in ready])
        if self.max_staleness is not None:
            fresh_enough = ~(versions < step - 1 - self.max_staleness)
            ready = [row for row, keep in zip(ready, fresh_enough, strict=True) if keep]
            versions = versions[fresh_enough]
        uses = np.array([row.uses for row in ready], np.float64)
        draw = np.random.default_rng([self.seed, step])
        priorities = self.priority(np.nan_to_num(versions), uses, draw)
        return take(self._ranked([row.experience_id for row in ready], priorities), size)

    def _cooled(self, found: Sequence[Candidate]) -> list[Candidate]:
        """Without the rows that were trained too short a time ago."""
        if self.cooldown is None:
            return list(found)
        now = self.now()
        rested = {
            step
            for step, read_at in _reading_times(self.store).items()
            if (now - read_at).total_seconds() >= self.cooldown
        }
        return [row for row in found if row.last_step is None or row.last_step in rested]

    def _ranked(self, ids: list[str], priorities: Numbers) -> list[list[str]]:
        """Rows or groups, best first. A group is as good as its best row; one of which a row may not come stays out."""
        units = groups(ids) if self.whole_groups else [[row] for row in ids]
        known = dict(zip(ids, priorities.tolist(), strict=True))
        scores = np.array([max(known[row] for row in unit) for unit in units])
        barred = np.array([any(np.isnan(known[row]) for row in unit) for unit in units], bool)
        order = np.argsort(-scores, kind="stable")
        return [units[i] for i in order.tolist() if not barred[i]]


def groups(ids: Iterable[str]) -> list[list[str]]:
    """The rows of each group together, in the order of their first rows."""
    found: dict[str, list[str]] = {}
    for row in ids:
        found.setdefault(group_of(row), []).append(row)
    return list(found.values())


def take(units: Iterable[list[str]], size: int) -> list[str]:
    """Whole units in their order while they fit; one that is larger than `size` is a batch by itself."""
    chosen: list[str] = []
    for unit in units:
        if len(chosen) + len(unit) > size and (chosen or not size):
            break
        chosen += unit
    return chosen


def model_versions(store: Store, ids: Sequence[str]) -> Numbers:
    """The version that made each row; NaN where nobody sampled it."""
    if not ids:
        return np.zeros(0)
    column = store.read(ids, columns=["model_version"])["model_version"]
    return np.asarray(column.cast("float64").to_numpy(zero_copy_only=False), np.float64)


def _reading_times(store: Store) -> dict[int, datetime]:
    """When each step read its batch."""
    rows = store.table("steps", columns=["step", "started_at"]).to_pylist()
    return {row["step"]: row["started_at"] for row in rows}
