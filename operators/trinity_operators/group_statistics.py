"""The rollouts of a table of experiences and their groups, as numbers.

A rollout of several turns has a row for each of them and counts once. Rollouts whose reward is missing
failed: they count in no mean. R rows, N rollouts, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trinity_operators.base import float_column, group_codes

Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class GroupedRewards:
    """Rewards of rollouts and the group of each, as numbers."""

    rewards_N: Floats
    """NaN for a rollout that failed."""
    codes_N: Codes
    num_groups: int

    @property
    def finished_N(self) -> Mask:
        """True where there is a reward."""
        return np.isfinite(self.rewards_N)

    def sizes_G(self) -> Floats:
        """How many rollouts of each group have a reward."""
        return self.sums_G(np.ones_like(self.rewards_N))

    def sums_G(self, values_N: Floats) -> Floats:
        """Sums over the finished rollouts of each group."""
        weights_N = np.where(self.finished_N, values_N, 0.0)
        return np.bincount(self.codes_N, weights=weights_N, minlength=self.num_groups).astype(
            np.float64, copy=False
        )

    def means_G(self, values_N: Floats) -> Floats:
        """Means over the finished rollouts; 0 for a group with none."""
        return self.sums_G(values_N) / np.maximum(self.sizes_G(), 1.0)

    def singletons_G(self) -> Mask:
        """Groups with nothing to compare: their advantage is the reward."""
        return self.sizes_G() <= 1

    def deviations_G(self, values_N: Floats, *, ddof: int) -> Floats:
        """Standard deviations of the finished rollouts; 0 where there are too few."""
        centered_N = values_N - self.means_G(values_N)[self.codes_N]
        return np.sqrt(self.sums_G(centered_N**2) / np.maximum(self.sizes_G() - ddof, 1.0))

    def maxima_G(self, values_N: Floats) -> Floats:
        """Maxima over the finished rollouts; 0 for a group with none."""
        tops_G = np.full(self.num_groups, -np.inf)
        np.maximum.at(tops_G, self.codes_N[self.finished_N], values_N[self.finished_N])
        return np.where(np.isfinite(tops_G), tops_G, 0.0)

    def ranks_N(self, values_N: Floats) -> Floats:
        """0, 1, … within each group from its lowest value up; finished rollouts come before the others."""
        order = np.lexsort((np.where(self.finished_N, values_N, np.inf), self.codes_N))
        sizes_G = np.bincount(self.codes_N, minlength=self.num_groups)
        starts_G = np.cumsum(sizes_G) - sizes_G
        ranks_N = np.empty(len(order))
        ranks_N[order] = np.arange(len(order)) - starts_G[self.codes_N[order]]
        return ranks_N

    def only(self, kept_N: Mask) -> GroupedRewards:
        """The groups as if the other rollouts had failed."""
        return replace(self, rewards_N=np.where(kept_N, self.rewards_N, np.nan))

    def finish(self, advantages_N: Floats) -> Floats:
        """The advantages, 0 for rollouts that failed."""
        return np.where(self.finished_N, advantages_N, 0.0)


def number_rollouts(rows: pa.Table) -> tuple[Codes, Codes, int]:
    """The rollout number of each row, the group number of each rollout, and the number of groups."""
    groups_R, num_groups = group_codes(rows)
    rollouts_R = np.asarray(rows["rollout"].to_numpy(zero_copy_only=False), dtype=np.int64)
    width = int(rollouts_R.max(initial=0)) + 1
    keys_N, codes_R = np.unique(groups_R * width + rollouts_R, return_inverse=True)
    return codes_R, keys_N // width, num_groups


@dataclass(frozen=True)
class GroupedRollouts:
    """Which rows make up a rollout, and what the rows of each come to."""

    rows: pa.Table
    codes_R: Codes
    """For each row the number of its rollout."""
    groups: GroupedRewards

    @staticmethod
    def of(rows: pa.Table) -> GroupedRollouts:
        """Rows with one `group_id` and one `rollout` are a rollout."""
        codes_R, codes_N, num_groups = number_rollouts(rows)
        rewards_R, num_rollouts = float_column(rows, "reward"), len(codes_N)
        # the mean of a rollout's rows: exact where all carry the same reward, NaN where none has any
        finished_R = np.isfinite(rewards_R)
        anchors_N = np.full(num_rollouts, np.nan)
        anchors_N[codes_R[finished_R]] = rewards_R[finished_R]
        offsets_R = np.where(finished_R, rewards_R - anchors_N[codes_R], 0.0)
        counts_N = np.maximum(np.bincount(codes_R[finished_R], minlength=num_rollouts), 1)
        rewards_N = anchors_N + np.bincount(codes_R, weights=offsets_R, minlength=num_rollouts) / counts_N
        return GroupedRollouts(rows, codes_R, GroupedRewards(rewards_N, codes_N, num_groups))

    def sums_N(self, values_R: Floats) -> Floats:
        """For each rollout the sum over its rows."""
        num_rollouts = len(self.groups.rewards_N)
        return np.bincount(self.codes_R, weights=values_R, minlength=num_rollouts).astype(
            np.float64, copy=False
        )

    def minima_N(self, values_R: Floats) -> Floats:
        """For each rollout the lowest value of its rows."""
        lowest_N = np.full(len(self.groups.rewards_N), np.inf)
        np.minimum.at(lowest_N, self.codes_R, values_R)
        return lowest_N
