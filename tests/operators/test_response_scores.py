"""Scores of single responses, of their tokens, log-probs and weights, against numbers worked out by hand."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pyarrow as pa
import pytest

from trinity_data.schema import EXPERIENCES
from trinity_operators.certainty import SelfCertainty
from trinity_operators.mappers import PassRateCalculator
from trinity_operators.repetition import RepetitionFilter, RepetitionPenalty, repeated_share
from trinity_operators.staleness import StalenessFilter


def responses(*tokens: list[int] | None) -> pa.Table:
    """Each behind a prompt of two tokens, with a reward of 1."""
    return pa.table(
        {
            "token_ids": pa.array(
                [None if row is None else [7, 7, *row] for row in tokens], pa.list_(pa.int32())
            ),
            "prompt_length": pa.array([None if row is None else 2 for row in tokens], pa.int32()),
            "reward": [1.0] * len(tokens),
        }
    )


def test_the_repeated_share_is_of_the_responses_own_ngrams() -> None:
    rows = responses([1, 2, 1, 2, 1], [7, 7, 7, 7], [1, 2, 3], [5], [], None)
    # bigrams 12 21 12 21: two of four are new; 77 three times: one; two different; one; none
    np.testing.assert_allclose(repeated_share(rows, 2), [0.5, 2 / 3, 0.0, 0.0, 0.0, 0.0])
    # trigrams 121 212 121: two of three are new
    np.testing.assert_allclose(repeated_share(rows, 3), [1 / 3, 0.5, 0.0, 0.0, 0.0, 0.0])
    np.testing.assert_allclose(repeated_share(rows.slice(1), 2), [2 / 3, 0.0, 0.0, 0.0, 0.0])


def test_repetition_costs_reward_or_drops_the_row() -> None:
    rows = responses([1, 2, 1, 2, 1], [1, 2, 3])
    columns = RepetitionPenalty(ngram_size=2, penalty_factor=0.4).map(rows)
    np.testing.assert_allclose(np.asarray(columns["reward"]), [0.8, 1.0])
    np.testing.assert_allclose(np.asarray(columns["repetition"]), [0.5, 0.0])
    result = RepetitionFilter(max_share=0.4, ngram_size=2).apply(rows)
    assert result.keep.tolist() == [False, True]
    assert next(iter(result.reason)).as_py() == "share of repeated 2-grams above 0.4"


def test_self_certainty_samples_the_other_divergence_than_kangs() -> None:
    # one position; of the tokens with these probabilities each is sampled once
    shares_V = np.array([0.5, 0.25, 0.25])
    rows = pa.table({"logprobs": [[np.log(share)] for share in shares_V], "action_mask": [[True]] * 3})
    mean = float(shares_V @ np.asarray(SelfCertainty().map(rows)["self_certainty"]))
    # the entropy is 1.5 bits
    assert mean == pytest.approx(-1.5 * np.log(2))
    from_uniform, to_uniform = np.log(3) + mean, -np.log(3) + (1 + 2 + 2) / 3 * np.log(2)
    assert (round(from_uniform, 4), round(to_uniform, 4)) == (0.0589, 0.0566)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        # of the tokens under the mask: -1, -2, -3; -0.5; none; none
        ("mean", [-2.0, -0.5, np.nan, np.nan]),
        ("tail", [-2.5, -0.5, np.nan, np.nan]),
        ("lowest", [-3.0, -0.5, np.nan, np.nan]),
    ],
)
def test_self_certainty_is_of_the_sampled_tokens(
    aggregation: Literal["mean", "tail", "lowest"], expected: list[float]
) -> None:
    rows = pa.table(
        {
            "logprobs": pa.array([[-1, -9, -2, -3], [-0.5], None, []], EXPERIENCES.field("logprobs").type),
            "action_mask": [[True, False, True, True], [True], [True], []],
        }
    )
    columns = SelfCertainty(aggregation, tail_tokens=2).map(rows)
    np.testing.assert_allclose(np.asarray(columns["self_certainty"]), expected)


def test_staleness_counts_from_the_oldest_token() -> None:
    spans = [
        [{"start": 0, "version": 4}],
        [{"start": 0, "version": 2}, {"start": 5, "version": 4}],
        None,
        [],
    ]
    rows = pa.table(
        {
            "step": pa.array([5, 5, 5, 5]),
            "model_version": pa.array([4, 4, 3, None], pa.int64()),
            "version_spans": pa.array(spans, EXPERIENCES.field("version_spans").type),
        }
    )
    result = StalenessFilter(max_staleness=1).apply(rows)
    np.testing.assert_array_equal(np.asarray(result.scores["staleness"]), [0, 2, 1, np.nan])
    assert result.keep.tolist() == [True, False, True, False]
    assert [reason.as_py() for reason in result.reason] == [
        *("staleness below ", "staleness above 1", "staleness below ", "no staleness")
    ]


def test_the_pass_rate_is_the_mean_reward_of_the_groups_rollouts() -> None:
    rows = pa.table(
        {
            "group_id": ["a", "a", "a", "b", "c"],
            "rollout": [0, 1, 1, 0, 0],
            "reward": pa.array([1.0, 0.0, 0.0, 0.25, None], pa.float64()),
        }
    )
    result = PassRateCalculator().map(rows)
    np.testing.assert_array_equal(np.asarray(result.columns["pass_rate"]), [0.5, 0.5, 0.5, 0.25, np.nan])
