"""Normalized and clipped rewards against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from trinity_data.errors import OperatorError
from trinity_operators.normalization import RewardClip, RewardNormalization


def rewarded(rewards: list[float | None], groups: str, rollouts: list[int] | None = None) -> pa.Table:
    return pa.table(
        {
            "group_id": list(groups),
            "rollout": rollouts or list(range(len(rewards))),
            "reward": pa.array(rewards, pa.float64()),
        }
    )


def normalized(operator: RewardNormalization, rows: pa.Table) -> list[float]:
    return [float(reward) for reward in np.asarray(operator.map(rows)["reward"])]


def test_over_a_group_each_rollout_counts_once_and_a_missing_reward_stays_missing() -> None:
    # group a: 0, 2 (two turns), missing: mean 1, deviation 1; group b: one rollout
    rows = rewarded([0.0, 2.0, 2.0, None, 5.0], "aaaab", [0, 1, 1, 2, 0])
    operator = RewardNormalization(epsilon=0.0)
    assert operator.whole_groups and not operator.keeps_state
    values = normalized(operator, rows.slice(0, 4))
    np.testing.assert_array_equal(values, [-1.0, 1.0, 1.0, np.nan])
    np.testing.assert_allclose(normalized(RewardNormalization(), rows), [-1, 1, 1, np.nan, 0], rtol=1e-5)


def test_over_a_step_all_groups_share_mean_and_deviation() -> None:
    operator = RewardNormalization(over="step", epsilon=0.0)
    assert operator.whole_steps and not operator.whole_groups
    # mean 2, squares 4 + 0 + 0 + 4, deviation √2
    np.testing.assert_allclose(
        normalized(operator, rewarded([0.0, 2.0, 2.0, 4.0], "aabb")), np.array([-2, 0, 0, 2]) / 2**0.5
    )


def test_a_running_mean_is_of_all_rewards_so_far() -> None:
    operator = RewardNormalization(over="running", scale=False)
    assert operator.keeps_state and not operator.pure
    assert normalized(operator, rewarded([0.0, 2.0], "aa")) == [-1.0, 1.0]
    # 0, 2, 4, 6: mean 3
    assert normalized(operator, rewarded([4.0, 6.0], "bb")) == [1.0, 3.0]
    np.testing.assert_array_equal(normalized(operator, rewarded([None], "c")), [np.nan])
    scaled = RewardNormalization(over="running", epsilon=0.0)
    normalized(scaled, rewarded([0.0, 2.0], "aa"))
    # deviation of 0, 2, 4, 6: √5
    np.testing.assert_allclose(normalized(scaled, rewarded([4.0, 6.0], "bb")), np.array([1, 3]) / 5**0.5)


def test_rewards_are_clipped_at_both_bounds_or_one() -> None:
    rows = rewarded([-2.0, 0.5, 3.0, None], "aaaa")
    np.testing.assert_array_equal(np.asarray(RewardClip(-1.0, 1.0).map(rows)["reward"]), [-1, 0.5, 1, np.nan])
    np.testing.assert_array_equal(np.asarray(RewardClip(high=1.0).map(rows)["reward"]), [-2, 0.5, 1, np.nan])


@pytest.mark.parametrize(
    ("bounds", "wording"),
    [({}, "neither low nor high is given"), ({"low": 1.0, "high": 0.0}, "high, 0, lies below low, 1")],
)
def test_bounds_that_clip_nothing_or_everything_are_refused(bounds: dict[str, float], wording: str) -> None:
    with pytest.raises(OperatorError, match=wording):
        RewardClip(**bounds)
