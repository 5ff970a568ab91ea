"""Two sets of outcomes of the same experiences, compared.

What is compared is what training would see: rewards, advantages, and which rows were kept.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.schema import filled
from trinity_operators.base import Bools, Codes, Floats, float_column, group_codes

COMPARED = ("experience_id", "group_id", "reward", "advantage", "kept", "dropped_by")
# smaller differences are rounding
_SAME = 1e-9


@dataclass(frozen=True)
class _OfRows:
    """Numbers about rows, which add up field by field, or as the metadata of a field say."""

    def __add__(self, other: Self) -> Self:
        """Of the rows of both, which have no group in common."""
        sums: dict[str, Any] = {}
        for each in fields(self):
            add = each.metadata.get("add", operator.add)
            sums[each.name] = add(getattr(self, each.name), getattr(other, each.name))
        return type(self)(**sums)


def _counts_of_both(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted((Counter(one) + Counter(other)).items()))


@dataclass(frozen=True)
class Shift(_OfRows):
    """How a number changed over the rows that have it both times."""

    num_rows: int = 0
    num_changed: int = 0
    sum_before: float = 0.0
    sum_after: float = 0.0
    largest: float = field(default=0.0, metadata={"add": max})
    """Change."""

    @property
    def mean_before(self) -> float:
        return _share(self.sum_before, self.num_rows)

    @property
    def mean_after(self) -> float:
        return _share(self.sum_after, self.num_rows)


@dataclass(frozen=True)
class Comparison(_OfRows):
    """Another pipeline's outcomes of the same rows against those that the run stored."""

    num_rows: int = 0
    """Experiences; a rollout of several turns has several."""
    num_rollouts: int = 0
    num_without_outcome: int = 0
    """Rows without a stored outcome; everything below is about the others."""
    kept_before: int = 0
    kept_after: int = 0
    newly_kept: int = 0
    newly_dropped: int = 0
    dropped_by_before: dict[str, int] = field(default_factory=dict, metadata={"add": _counts_of_both})
    dropped_by_after: dict[str, int] = field(default_factory=dict, metadata={"add": _counts_of_both})
    reward: Shift = Shift()
    advantage: Shift = Shift()
    num_opposite: int = 0
    """Of the rows with an advantage both times: those whose sign turned round."""
    num_lost: int = 0
    """Those whose advantage was not zero and is."""
    num_gained: int = 0
    """Those whose advantage was zero and is not."""
    num_groups: int = 0
    groups_losing_variance: int = 0
    """Groups whose kept rows had rewards that differ, and have none any more."""
    groups_gaining_variance: int = 0

    @property
    def signs_opposite(self) -> float:
        """A share, as the two below."""
        return _share(self.num_opposite, self.advantage.num_rows)

    @property
    def signs_lost(self) -> float:
        return _share(self.num_lost, self.advantage.num_rows)

    @property
    def signs_gained(self) -> float:
        return _share(self.num_gained, self.advantage.num_rows)


def compare(before: pa.Table, after: pa.Table) -> Comparison:
    """Two tables `outcomes`, the stored one and the other pipeline's; rows of `before` alone do not count."""
    places = pc.index_in(after["experience_id"], value_set=before["experience_id"].combine_chunks())
    both = after.select(COMPARED).filter(places.is_valid())
    stored = before.select(COMPARED).take(places.drop_null())
    for name in ("reward", "advantage", "kept", "dropped_by"):
        both = both.append_column(f"{name}_before", stored[name])
    kept_before, kept_after = _bools(both["kept_before"]), _bools(both["kept"])
    codes, num_groups = group_codes(both)
    had_variance = _varies(codes, num_groups, float_column(both, "reward_before"), kept_before)
    has_variance = _varies(codes, num_groups, float_column(both, "reward"), kept_after)
    opposite, lost, gained = _signs(both, kept_before & kept_after)
    return Comparison(
        num_rows=after.num_rows,
        # an id ends in the turn
        num_rollouts=len(pc.unique(pc.replace_substring_regex(after["experience_id"], r"/[^/]*$", ""))),
        num_without_outcome=after.num_rows - both.num_rows,
        kept_before=int(kept_before.sum()),
        kept_after=int(kept_after.sum()),
        newly_kept=int((kept_after & ~kept_before).sum()),
        newly_dropped=int((kept_before & ~kept_after).sum()),
        dropped_by_before=_counts(both["dropped_by_before"]),
        dropped_by_after=_counts(both["dropped_by"]),
        reward=_shift(both, "reward", np.ones(both.num_rows, np.bool_)),
        advantage=_shift(both, "advantage", kept_before & kept_after),
        num_opposite=opposite,
        num_lost=lost,
        num_gained=gained,
        num_groups=num_groups,
        groups_losing_variance=int((had_variance & ~has_variance).sum()),
        groups_gaining_variance=int((has_variance & ~had_variance).sum()),
    )


def _share(part: float, whole: int) -> float:
    return part / whole if whole else math.nan


def _bools(column: pa.ChunkedArray[Any]) -> Bools:
    return np.asarray(filled(column, False).to_numpy(zero_copy_only=False), dtype=np.bool_)


def _counts(labels: pa.ChunkedArray[Any]) -> dict[str, int]:
    """Rows by the operator that dropped them."""
    return dict(sorted(Counter(label for label in labels.to_pylist() if label).items()))


def _shift(both: pa.Table, name: str, where: Bools) -> Shift:
    before, after = float_column(both, f"{name}_before"), float_column(both, name)
    where = where & ~np.isnan(before) & ~np.isnan(after)
    before, after = before[where], after[where]
    change = np.abs(after - before)
    num_changed, largest = int(np.count_nonzero(change > _SAME)), float(change.max(initial=0.0))
    return Shift(len(before), num_changed, float(before.sum()), float(after.sum()), largest)


def _signs(both: pa.Table, where: Bools) -> tuple[int, int, int]:
    """Rows with an advantage both times whose sign turned, became zero, came from zero."""
    before, after = float_column(both, "advantage_before"), float_column(both, "advantage")
    where = where & ~np.isnan(before) & ~np.isnan(after)
    was, is_now = np.sign(_rounded(before[where])), np.sign(_rounded(after[where]))
    turned, lost, gained = was * is_now < 0, (was != 0) & (is_now == 0), (was == 0) & (is_now != 0)
    return int(turned.sum()), int(lost.sum()), int(gained.sum())


def _rounded(numbers: Floats) -> Floats:
    """What is zero but for rounding is zero."""
    return np.where(np.abs(numbers) <= _SAME, 0.0, numbers)


def _varies(codes: Codes, num_groups: int, rewards: Floats, kept: Bools) -> Bools:
    """For each group whether the rewards of its kept rows differ."""
    kept = kept & ~np.isnan(rewards)
    lowest, highest = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(lowest, codes[kept], rewards[kept])
    np.maximum.at(highest, codes[kept], rewards[kept])
    varies: Bools = highest - lowest > _SAME
    return varies
