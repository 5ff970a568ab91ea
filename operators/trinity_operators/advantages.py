"""Group advantages: how much better a rollout did than the others of its task, one number a rollout.

A rollout of several turns has a row for each of them, and its advantage is on all of them. Rollouts whose
reward is missing failed: they count in no mean and get advantage 0. Everything is vectorized over all groups
of the call. R rows, N rollouts, G groups; filters of whole groups use the same numbers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from trinity_data.errors import OperatorError
from trinity_operators.base import Bools, Codes, Column, Floats, Mapper, float_column, group_codes

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class GroupedRewards:
    """Rewards of rollouts and the group of each, as numbers."""

    rewards_N: Floats
    """NaN for a rollout that failed."""
    codes_N: Codes
    num_groups: int

    @property
    def finished_N(self) -> Bools:
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

    def singletons_G(self) -> Bools:
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

    def only(self, kept_N: Bools) -> GroupedRewards:
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


def grpo_advantages(
    groups: GroupedRewards,
    *,
    epsilon: float = 1e-6,
    std_threshold: float | None = None,
    std_cal_level: Literal["group", "batch"] = "group",
) -> Floats:
    """(R − mean)/(s + ε), s unbiased; R/(1 + ε) in a group of one, and 0 at or under the threshold of s."""
    rewards_N, codes_N, alone_G = groups.rewards_N, groups.codes_N, groups.singletons_G()
    means_G = np.where(alone_G, 0.0, groups.means_G(rewards_N))
    stds_G = groups.deviations_G(rewards_N, ddof=1)
    scales_G = stds_G
    if std_cal_level == "batch":
        finished = rewards_N[groups.finished_N]
        scales_G = np.full_like(stds_G, finished.std(ddof=1) if len(finished) > 1 else 1.0)
    # nothing is taken off the reward of a group of one, so a small s would make it huge
    scales_G = np.where(alone_G, 1.0, scales_G)
    advantages_N = (rewards_N - means_G[codes_N]) / (scales_G[codes_N] + epsilon)
    if std_threshold is not None:
        flat_G = alone_G | (stds_G <= std_threshold)
        advantages_N = np.where(flat_G[codes_N], 0.0, advantages_N)
    return groups.finish(advantages_N)


def rloo_advantages(groups: GroupedRewards) -> Floats:
    """R − mean of the others; A = R in a group of one."""
    sizes_G = groups.sizes_G()
    factors_G = sizes_G / np.maximum(sizes_G - 1, 1.0)
    return groups.finish(factors_G[groups.codes_N] * _centered(groups))


def reinforce_advantages(groups: GroupedRewards) -> Floats:
    """A = R."""
    return groups.finish(groups.rewards_N)


def opmd_advantages(
    groups: GroupedRewards, *, opmd_baseline: Literal["mean", "logavgexp"] = "mean", tau: Positive = 1.0
) -> Floats:
    """R − b with b the mean, or τ(logsumexp(R/τ) − log n); A = R in a group of one."""
    if opmd_baseline == "mean":
        return groups.finish(_centered(groups))
    tops_G = groups.maxima_G(groups.rewards_N)
    # relative to the group's best, so that no exponential overflows
    relative_N = np.exp((groups.rewards_N - tops_G[groups.codes_N]) / tau)
    baselines_G = tops_G + tau * np.log(np.where(groups.sizes_G() > 0, groups.means_G(relative_N), 1.0))
    baselines_G = np.where(groups.singletons_G(), 0.0, baselines_G)
    return groups.finish(groups.rewards_N - baselines_G[groups.codes_N])


def asymre_advantages(groups: GroupedRewards, *, baseline_shift: float = -0.1) -> Floats:
    """R − (mean + shift): with a negative shift, good rollouts push more than bad ones.

    A = R in a group of one.
    """
    shifts_G = np.where(groups.singletons_G(), 0.0, baseline_shift)
    return groups.finish(_centered(groups) - shifts_G[groups.codes_N])


def rec_advantages(
    groups: GroupedRewards,
    *,
    epsilon: NonNegative = 1e-6,
    std_normalize: bool = False,
    kept_N: Bools | None = None,
) -> Floats:
    """R − mean, over the biased s + ε if normalized, of the rollouts to keep; A = 0 for the rest."""
    kept = groups if kept_N is None else groups.only(kept_N)
    advantages_N = _centered(kept)
    if std_normalize:
        scales_G = np.where(kept.singletons_G(), 1.0, kept.deviations_G(kept.rewards_N, ddof=0))
        advantages_N = advantages_N / (scales_G + epsilon)[kept.codes_N]
    return kept.finish(advantages_N)


def reinforceplusplus_advantages(groups: GroupedRewards, tokens_N: Floats) -> Floats:
    """(R − mean)/√(var + 1e-8) over all trained tokens of the call, each with the reward of its rollout."""
    finished_N = groups.finished_N
    weights_N, rewards_N = np.where(finished_N, tokens_N, 0.0), np.where(finished_N, groups.rewards_N, 0.0)
    num_tokens = weights_N.sum()
    centered_N = rewards_N - (weights_N @ rewards_N) / max(num_tokens, 1.0)
    variance = (weights_N @ centered_N**2) / max(num_tokens - 1.0, 1.0)
    return groups.finish(centered_N / np.sqrt(variance + 1e-8))


def apply_rank_penalty(groups: GroupedRewards, mean_logprobs_N: Floats, penalty: float) -> GroupedRewards:
    """Rewards R(1 − ρ·rank/n), rank 0 for the least likely response of a group:
    what is rare and right pays most.
    """
    ranks_N = groups.ranks_N(mean_logprobs_N)
    sizes_N = np.maximum(groups.sizes_G(), 1.0)[groups.codes_N]
    return replace(groups, rewards_N=groups.rewards_N * (1.0 - penalty * ranks_N / sizes_N))


def balance_mask_N(groups: GroupedRewards, lottery_N: Floats) -> Bools:
    """False for a random surplus of the rollouts under their group's mean,
    where those at or over it are fewer.
    """
    low_N = groups.finished_N & (groups.rewards_N < groups.means_G(groups.rewards_N)[groups.codes_N])
    num_low_G = groups.sums_G(low_N.astype(np.float64))
    num_high_G = groups.sizes_G() - num_low_G
    drawn_N = groups.only(low_N).ranks_N(lottery_N)
    kept: Bools = ~low_N | (drawn_N < num_high_G[groups.codes_N])
    return kept


def _centered(groups: GroupedRewards) -> Floats:
    means_G = np.where(groups.singletons_G(), 0.0, groups.means_G(groups.rewards_N))
    return groups.rewards_N - means_G[groups.codes_N]


class GroupAdvantage(Mapper):
    """Writes `advantage` from `reward`, `group_id` and `rollout`."""

    reads: tuple[str, ...] = ("reward", "group_id", "rollout")
    writes = ("advantage",)
    whole_groups = True

    def map(self, rows: pa.Table) -> Mapping[str, Column]:
        rollouts = GroupedRollouts.of(rows)
        advantages_R = self.advantages(rollouts)[rollouts.codes_R]
        return {"advantage": np.where(np.isfinite(float_column(rows, "reward")), advantages_R, 0.0)}

    @abstractmethod
    def advantages(self, rollouts: GroupedRollouts) -> Floats:
        """One number a rollout."""


class GrpoAdvantage(GroupAdvantage):
    """(R − mean)/(s + `epsilon`) over the group, s its unbiased standard deviation.

    Groups with s at or under `std_threshold` get 0; `rank_penalty` lowers the rewards of likely responses
    first; with `std_cal_level: batch` s is over all rollouts of the step.
    """

    name = "grpo_advantage"

    def __init__(
        self,
        *,
        epsilon: NonNegative = 1e-6,
        std_threshold: NonNegative | None = None,
        rank_penalty: Share | None = None,
        std_cal_level: Literal["group", "batch"] = "group",
    ) -> None:
        self.epsilon = epsilon
        self.std_threshold = std_threshold
        self.rank_penalty = rank_penalty
        if rank_penalty is not None:
            self.reads = (*self.reads, "logprobs")
        self.std_cal_level = std_cal_level
        self.whole_steps = std_cal_level == "batch"

    def advantages(self, rollouts: GroupedRollouts) -> Floats:
        groups = rollouts.groups
        if self.rank_penalty is not None:
            lengths_R = pc.fill_null(pc.list_value_length(rollouts.rows["logprobs"]), 0)
            num_tokens_N = rollouts.sums_N(np.asarray(lengths_R.to_numpy(), dtype=np.float64))
            sums_N = rollouts.sums_N(_list_sums(rollouts.rows, "logprobs"))
            groups = apply_rank_penalty(groups, sums_N / np.maximum(num_tokens_N, 1.0), self.rank_penalty)
        return grpo_advantages(
            groups,
            epsilon=self.epsilon,
            std_threshold=self.std_threshold,
            std_cal_level=self.std_cal_level,
        )


class RlooAdvantage(GroupAdvantage):
    """R − the mean reward of the others in the group."""

    name = "rloo_advantage"

    def advantages(self, rollouts: GroupedRollouts) -> Floats:
        return rloo_advantages(rollouts.groups)


class ReinforceAdvantage(GroupAdvantage):
    """R as it is."""

    name = "reinforce_advantage"

    def advantages(self, rollouts: GroupedRollouts) -> Floats:
        return reinforce_advantages(rollouts.groups)


class OpmdAdvantage(GroupAdvantage):
    """R − b with b the mean reward of the group, or τ(logsumexp(R/τ) − log n) with `logavgexp`."""

    name = "opmd_advantage"

    def __init__(self, *, opmd_baseline: Literal["mean", "logavgexp"] = "mean", tau: Positive = 1.0) -> None:
        self.opmd_baseline = opmd_baseline
        self.tau = tau

    def advantages(self, rollouts: GroupedRollouts) -> Floats:
        return opmd_advantages(rollouts.groups, opmd_baseline=self.opmd_baseline, tau=self.tau)


class AsymreAdvantage(GroupAdvantage):
    """R − (mean + `baseline_shift`) over the group: a negative shift lets good rollouts push more."""

    name = "asymre_advantage"

    def __init__(self, *, baseline_shift: float = -0.1) -> None:
        self.baseline_shift = baseline_shift

    def advantages(self, rollouts: GroupedRollouts) -> Floats:
        return asymre_advantages(rollouts.groups, baseline_shift=self.baseline_shift)


class RecAdvantage(GroupAdvantage):
    """R − mean over the group, with `std_normalize` over its biased standard deviation.

    `drop: balance` leaves out a surplus of low rewards, and draws by the hashes of the rows' ids: the
    same rollouts, the same draw.
    """

    name = "rec_advantage"

    def __init__(
        self,
        *,
        epsilon: NonNegative = 1e-6,
        std_normalize: bool = False,
        drop: Literal["balance"] | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.std_normalize = std_normalize
        self.drop = drop
        if drop is not None:
            self.reads = (*self.reads, "experience_id")

    def advantages(self, rollouts: GroupedRollouts) -> Floats:
        lottery_N = rollouts.minima_N(_hash_uniform(rollouts.rows)) if self.drop == "balance" else None
        kept_N = None if lottery_N is None else balance_mask_N(rollouts.groups, lottery_N)
        return rec_advantages(
            rollouts.groups, epsilon=self.epsilon, std_normalize=self.std_normalize, kept_N=kept_N
        )


class ReinforcePlusPlusAdvantage(GroupAdvantage):
    """(R − mean)/√(var + 1e-8) over all trained tokens of the step."""

    name = "reinforceplusplus_advantage"
    whole_steps = True
    reads = (*GroupAdvantage.reads, "action_mask")

    def __init__(self, *, gamma: float = 1.0) -> None:
        if gamma != 1.0:
            raise OperatorError(
                f"gamma: found {gamma!r}; only 1.0 is allowed, "
                "as another discount would give every token of a row an advantage of its own"
            )

    def advantages(self, rollouts: GroupedRollouts) -> Floats:
        return reinforceplusplus_advantages(
            rollouts.groups, rollouts.sums_N(_list_sums(rollouts.rows, "action_mask"))
        )


def _list_sums(rows: pa.Table, column: str) -> Floats:
    lists = rows[column].combine_chunks()
    values = np.asarray(pc.list_flatten(lists).to_numpy(zero_copy_only=False), dtype=np.float64)
    owners = pc.list_parent_indices(lists).to_numpy()
    return np.bincount(owners, weights=values, minlength=len(lists)).astype(np.float64, copy=False)


def _hash_uniform(rows: pa.Table) -> Floats:
    """A number in 0…1 for each row, drawn by its id:
    no state, and the same over a stream and over a store.
    """
    ids = np.asarray(rows["experience_id"].to_numpy(zero_copy_only=False), dtype=np.bytes_)
    letters = ids.view(np.uint8).reshape(len(ids), -1).astype(np.uint64)
    multipliers = np.random.default_rng(0).integers(1, 2**63, size=letters.shape[1], dtype=np.uint64)
    hashes = letters @ (multipliers | np.uint64(1))
    hashes ^= hashes >> np.uint64(32)
    return (hashes * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(11)).astype(np.float64) / 2.0**53
