"""Group advantages: how much better a rollout did than the others of its task, one number a rollout.

A rollout of several turns has a row for each of them, and its advantage is on all of them. Rollouts whose
reward is missing failed: they count in no mean and get advantage 0. Everything is vectorized over all groups
of the call. R rows, N rollouts, G groups.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from trinity_data.errors import OperatorError
from trinity_operators.base import Column, Mapper, float_column
from trinity_operators.group_statistics import Floats, GroupedRewards, GroupedRollouts, Mask

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


def grpo_advantages(
    groups: GroupedRewards,
    *,
    epsilon: float = 1e-6,
    std_threshold: float | None = None,
    std_cal_level: Literal["group", "batch"] = "group",
) -> Floats:
    """(R − mean)/(s + ε), s unbiased; A = R/(1 + ε) in a group of one.

    At or under the threshold of s, A = 0.
    """
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
    kept_N: Mask | None = None,
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


def balance_mask_N(groups: GroupedRewards, lottery_N: Floats) -> Mask:
    """False for a random surplus of the rollouts under their group's mean,
    where those at or over it are fewer.
    """
    low_N = groups.finished_N & (groups.rewards_N < groups.means_G(groups.rewards_N)[groups.codes_N])
    num_low_G = groups.sums_G(low_N.astype(np.float64))
    num_high_G = groups.sizes_G() - num_low_G
    drawn_N = groups.only(low_N).ranks_N(lottery_N)
    kept: Mask = ~low_N | (drawn_N < num_high_G[groups.codes_N])
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
    name = "rloo_advantage"

    def advantages(self, rollouts: GroupedRollouts) -> Floats:
        return rloo_advantages(rollouts.groups)


class ReinforceAdvantage(GroupAdvantage):
    name = "reinforce_advantage"

    def advantages(self, rollouts: GroupedRollouts) -> Floats:
        return reinforce_advantages(rollouts.groups)


class OpmdAdvantage(GroupAdvantage):
    name = "opmd_advantage"

    def __init__(self, *, opmd_baseline: Literal["mean", "logavgexp"] = "mean", tau: Positive = 1.0) -> None:
        self.opmd_baseline = opmd_baseline
        self.tau = tau

    def advantages(self, rollouts: GroupedRollouts) -> Floats:
        return opmd_advantages(rollouts.groups, opmd_baseline=self.opmd_baseline, tau=self.tau)


class AsymreAdvantage(GroupAdvantage):
    name = "asymre_advantage"

    def __init__(self, *, baseline_shift: float = -0.1) -> None:
        self.baseline_shift = baseline_shift

    def advantages(self, rollouts: GroupedRollouts) -> Floats:
        return asymre_advantages(rollouts.groups, baseline_shift=self.baseline_shift)


class RecAdvantage(GroupAdvantage):
    """`drop: balance` draws by the hashes of the rows' ids: the same rollouts, the same draw."""

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
    """Whitened over all rows of a step."""

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
