"""Two sets of outcomes of the same experiences, compared.

What is compared is what training would see: rewards, advantages, and which rows were kept.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.schema import filled
from trinity_operators.base import Bools, Codes, Floats, float_column, group_codes

_COMPARED = ("experience_id", "group_id", "reward", "advantage", "kept", "dropped_by")
# smaller differences are rounding
_SAME = 1e-9


@dataclass(frozen=True)
class Shift:
    """How a number changed over the rows that have it both times."""

    num_rows: int
    num_changed: int
    mean_before: float
    mean_after: float
    largest: float


@dataclass(frozen=True)
class Comparison:
    """Another pipeline's outcomes of the same rows against those that the run stored."""

    num_rows: int
    """Experiences; a rollout of several turns has several."""
    num_rollouts: int
    num_without_outcome: int
    """Rows without a stored outcome; everything below is about the others."""
    kept_before: int
    kept_after: int
    newly_kept: int
    newly_dropped: int
    dropped_by_before: dict[str, int]
    dropped_by_after: dict[str, int]
    reward: Shift
    advantage: Shift
    signs_opposite: float
    """Share of the rows with an advantage both times whose sign turned round."""
    signs_lost: float
    """Share whose advantage was not zero and is."""
    signs_gained: float
    """Share whose advantage was zero and is not."""
    num_groups: int
    groups_losing_variance: int
    """Groups whose kept rows had rewards that differ, and have none any more."""
    groups_gaining_variance: int


def compare(before: pa.Table, after: pa.Table) -> Comparison:
    """Two tables `outcomes`, the stored one and the other pipeline's; rows of `before` alone do not count."""
    both = after.select(_COMPARED).join(
        before.select(_COMPARED), "experience_id", join_type="inner", right_suffix="_before"
    )
    both = both.sort_by("experience_id")
    kept_before, kept_after = _bools(both["kept_before"]), _bools(both["kept"])
    codes, num_groups = group_codes(both)
    had_variance = _varies(codes, num_groups, float_column(both, "reward_before"), kept_before)
    has_variance = _varies(codes, num_groups, float_column(both, "reward"), kept_after)
    opposite, signs_lost, signs_gained = _signs(both, kept_before & kept_after)
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
        signs_opposite=opposite,
        signs_lost=signs_lost,
        signs_gained=signs_gained,
        num_groups=num_groups,
        groups_losing_variance=int((had_variance & ~has_variance).sum()),
        groups_gaining_variance=int((has_variance & ~had_variance).sum()),
    )


def _bools(column: pa.ChunkedArray[Any]) -> Bools:
    return np.asarray(filled(column, False).to_numpy(zero_copy_only=False), dtype=np.bool_)


def _counts(labels: pa.ChunkedArray[Any]) -> dict[str, int]:
    """Rows by the operator that dropped them."""
    return dict(sorted(Counter(label for label in labels.to_pylist() if label).items()))


def _shift(both: pa.Table, name: str, where: Bools) -> Shift:
    before, after = float_column(both, f"{name}_before"), float_column(both, name)
    where = where & ~np.isnan(before) & ~np.isnan(after)
    before, after = before[where], after[where]
    if not len(before):
        return Shift(0, 0, math.nan, math.nan, math.nan)
    change = np.abs(after - before)
    return Shift(
        len(before), int(np.count_nonzero(change > _SAME)), before.mean(), after.mean(), float(change.max())
    )


def _signs(both: pa.Table, where: Bools) -> tuple[float, float, float]:
    """Shares of the rows with an advantage both times whose sign turned, became zero, came from zero."""
    before, after = float_column(both, "advantage_before"), float_column(both, "advantage")
    where = where & ~np.isnan(before) & ~np.isnan(after)
    if not where.any():
        return math.nan, math.nan, math.nan
    was, is_now = np.sign(_rounded(before[where])), np.sign(_rounded(after[where]))
    turned, lost, gained = was * is_now < 0, (was != 0) & (is_now == 0), (was == 0) & (is_now != 0)
    return float(turned.mean()), float(lost.mean()), float(gained.mean())


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
