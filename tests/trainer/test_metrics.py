"""Numbers of a batch by hand: means over rollouts, ages, and log-probs at equal versions and older ones."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest

from trinity_data.schema import rows_to_table
from trinity_trainer.metrics import (
    batch_metrics,
    logprob_differences,
    num_trained_tokens,
    why_nothing_was_trained,
)

ROLLOUTS = [
    # rollout, turn, reward, advantage, length, truncated, version
    (0, 0, 1.0, 0.5, 2, "", 4),
    (0, 1, 1.0, 0.5, 3, "response", 4),
    (0, 2, 1.0, 0.5, 1, "", 3),
    (1, 0, 0.0, -1.0, 4, "", 2),
]


def rows() -> pa.Table:
    found: list[dict[str, object]] = [
        {
            "experience_id": f"e/rl/0000005/00000/{rollout:03d}/{turn:02d}", "reward": reward,
            "response_length": length, "truncated": truncated, "model_version": version,
            "logprobs": [-1.0] * length, "action_mask": [True] * (length - 1) + [turn == 0],
        }
        for rollout, turn, reward, _, length, truncated, version in ROLLOUTS
    ]  # fmt: skip
    table = rows_to_table("experiences", found)
    table = table.append_column("advantage", pa.array([row[3] for row in ROLLOUTS]))
    return table.append_column("shaped_reward", pa.array([None, None, None, math.nan], pa.float64()))


def test_means_are_over_rollouts_and_not_over_turns() -> None:
    assert batch_metrics(rows(), trained_version=4) == {
        "num_rollouts": 2.0,
        "turns/mean": 2.0,
        "reward/mean": 0.5,  # by rows it would be 0.75
        "advantage/mean": -0.25,
        "response_length/mean": 5.0,  # (2 + 3 + 1) and 4
        "truncated/mean": 0.5,
        "staleness/mean": 0.75,  # rows of versions 4, 4, 3, 2
        "staleness/max": 2.0,
    }
    assert batch_metrics(rows().slice(0, 0), trained_version=4) == {}


def test_detailed_metrics_have_the_spread_beside_each_mean() -> None:
    means = batch_metrics(rows(), trained_version=4)
    detailed = batch_metrics(rows(), trained_version=4, detailed=True)
    assert detailed.items() >= means.items()
    expected = {
        "turns": (1.0, 3.0, 1.0),
        "reward": (0.0, 1.0, 0.5),
        "advantage": (-1.0, 0.5, 0.75),
        "response_length": (4.0, 6.0, 1.0),
        # of the ages 0, 0, 1, 2: the squares of -0.75, -0.75, 0.25 and 1.25 have the mean 0.6875
        "staleness": (0.0, 2.0, math.sqrt(0.6875)),
    }
    found = {name: tuple(detailed[f"{name}/{kind}"] for kind in ("min", "max", "std")) for name in expected}
    assert found == {name: pytest.approx(values) for name, values in expected.items()}
    # no rollout has a shaped reward that is a number
    assert not any(name.startswith("shaped_reward") for name in detailed)
    assert batch_metrics(rows().slice(0, 0), trained_version=4, detailed=True) == {}


def test_tokens_that_are_masked_out_are_no_tokens_to_train() -> None:
    assert num_trained_tokens(rows()) == 2 + 2 + 0 + 4
    assert num_trained_tokens(rows().slice(2, 1)) == 0 and num_trained_tokens(rows().slice(0, 0)) == 0


def test_the_engines_error_is_distinguished_from_staleness() -> None:
    recomputed = pa.chunked_array(
        [pa.array([[-1.0, -1.25], [-1.5, -1.0, 9.0], [9.0], [-3.0, -1.0, -1.0, -1.0]])]
    )
    found = logprob_differences(rows(), recomputed, trained_version=4)
    assert found == {
        # 0, 0.25 and 0.5, 0; the 9.0 is masked out
        "logprob_diff/same_version_mean": pytest.approx(0.75 / 4),
        "logprob_diff/same_version_max": pytest.approx(0.5),
        "logprob_diff/older_mean": pytest.approx(0.5),
        "logprob_diff/older_max": pytest.approx(2.0),
    }


def test_rows_that_nobody_sampled_have_no_log_probs_to_compare() -> None:
    table = rows()
    empty = pa.array([[]] * 4, table.schema.field("logprobs").type)
    table = table.set_column(table.schema.get_field_index("logprobs"), "logprobs", empty)
    recomputed = pa.chunked_array([pa.array([[-1.0] * row[4] for row in ROLLOUTS])])
    assert logprob_differences(table, recomputed, trained_version=4) == {}


@pytest.mark.parametrize(
    ("metrics", "why"),
    [
        ({}, "nothing was left for it"),
        (
            {"rows/number": 8.0, "rows/dropped": 8.0},
            "nothing was left for it; of 8 rows of the data 8 are not trained",
        ),
        ({"num_rollouts": 3.0}, "none of its 3 rollouts has a token to train"),
        (
            {"rollout/number": 8.0, "rollout/failed": 6.0, "rollout/dropped": 2.0},
            "nothing was left for it; of 8 rollouts made for the step 6 failed and 2 were dropped",
        ),
    ],
)
def test_a_step_that_trained_nothing_says_why(metrics: dict[str, float], why: str) -> None:
    assert why_nothing_was_trained(metrics) == why
