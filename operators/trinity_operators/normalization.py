"""Rewards on a common scale: normalized over a group, a step or all that was seen, and clipped.

Each rollout counts once, whatever the number of its turns, and one without a reward counts nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from trinity_data.errors import OperatorError
from trinity_operators.advantages import GroupedRollouts
from trinity_operators.base import Column, Floats, Mapper, float_column

NonNegative = Annotated[float, Field(ge=0)]


class RewardNormalization(Mapper):
    """(R − mean) / (s + `epsilon`), s the population's standard deviation; R − mean without `scale`.

    `over` a group, a whole step, or running: all rollouts of the stage up to these ones.
    """

    name = "reward_normalization"
    reads = ("reward", "group_id", "rollout")
    writes = ("reward",)

    def __init__(
        self,
        over: Literal["group", "step", "running"] = "group",
        scale: bool = True,
        epsilon: NonNegative = 1e-6,
    ) -> None:
        self.over, self.scale, self.epsilon = over, scale, epsilon
        self.whole_groups, self.whole_steps = over == "group", over == "step"
        self.keeps_state, self.pure = over == "running", over != "running"
        self._count, self._mean, self._squares = 0, 0.0, 0.0

    def state(self) -> list[float]:
        return [self._count, self._mean, self._squares]

    def load(self, state: list[float]) -> None:
        self._count, self._mean, self._squares = int(state[0]), state[1], state[2]

    def map(self, rows: pa.Table) -> Mapping[str, Column]:
        rollouts, rewards_R = GroupedRollouts.of(rows), float_column(rows, "reward")
        groups = rollouts.groups
        if self.over == "group":
            means_N = groups.means_G(groups.rewards_N)[groups.codes_N]
            stds_N = groups.deviations_G(groups.rewards_N, ddof=0)[groups.codes_N]
            means_R, stds_R = means_N[rollouts.codes_R], stds_N[rollouts.codes_R]
        else:
            mean, std = self._statistics(groups.rewards_N[groups.finished_N])
            means_R, stds_R = np.full(len(rewards_R), mean), np.full(len(rewards_R), std)
        return {"reward": (rewards_R - means_R) / (stds_R + self.epsilon if self.scale else 1.0)}

    def _statistics(self, rewards_N: Floats) -> tuple[float, float]:
        """Mean and standard deviation of these rewards, or of all so far.

        Joins two sets as Chan, Golub and LeVeque 1979.
        """
        if not len(rewards_N):
            return self._mean, math.sqrt(self._squares / max(self._count, 1))
        mean = float(rewards_N.mean())
        squares = float(((rewards_N - mean) ** 2).sum())
        if self.over == "step":
            return mean, math.sqrt(squares / len(rewards_N))
        total, shift = self._count + len(rewards_N), mean - self._mean
        self._squares += squares + shift**2 * self._count * len(rewards_N) / total
        self._mean += shift * len(rewards_N) / total
        self._count = total
        return self._mean, math.sqrt(self._squares / total)


class RewardClip(Mapper):
    """Moves a reward below `low` to `low`, one above `high` to `high`."""

    name = "reward_clip"
    reads = ("reward",)
    writes = ("reward",)
    idempotent = True

    def __init__(self, low: float | None = None, high: float | None = None) -> None:
        if low is None and high is None:
            raise OperatorError("neither low nor high is given; give one of them, as in low: -1.0")
        if low is not None and high is not None and high < low:
            raise OperatorError(f"high, {high:g}, lies below low, {low:g}")
        self.low, self.high = low, high

    def map(self, rows: pa.Table) -> Mapping[str, Column]:
        return {"reward": np.clip(float_column(rows, "reward"), self.low, self.high)}
