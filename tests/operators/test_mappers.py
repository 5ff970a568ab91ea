"""Mappers against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from trinity_data.errors import OperatorError
from trinity_operators.mappers import (
    FormatBonus,
    LengthPenalty,
    QualityScore,
    RewardShapingMapper,
    distinct_share,
)


def rewarded(
    rewards: list[float | None], metrics: list[dict[str, float]] | None = None, **columns: Any
) -> pa.Table:
    entries = [list(metric.items()) for metric in metrics or [{}] * len(rewards)]
    return pa.table(
        {
            "reward": pa.array(rewards, pa.float64()),
            "metrics": pa.array(entries, pa.map_(pa.string(), pa.float64())),
            **columns,
        }
    )


def shaped(rows: pa.Table, *configs: dict[str, object]) -> list[float]:
    columns = RewardShapingMapper(configs).map(rows)  # type: ignore[arg-type]
    return [float(reward) for reward in np.asarray(columns["reward"])]


def config(stats_key: str, op_type: str, weight: float) -> dict[str, object]:
    return {"stats_key": stats_key, "op_type": op_type, "weight": weight}


@pytest.mark.parametrize(("op_type", "expected"), [("ADD", 3.0), ("SUB", 1.0), ("MUL", 2.0), ("DIV", 2.0)])
def test_a_reward_is_shaped_by_a_weighted_metric(op_type: str, expected: float) -> None:
    assert shaped(rewarded([2.0], [{"format": 0.25}]), config("format", op_type, 4.0)) == [expected]


def test_shapings_apply_one_after_another() -> None:
    rows = rewarded([1.0], [{"a": 2.0, "b": 3.0}])
    assert shaped(rows, config("a", "ADD", 1.0), config("b", "MUL", 2.0)) == [18.0]


def test_a_score_takes_precedence_over_a_metric_of_the_same_name() -> None:
    assert shaped(rewarded([1.0], [{"quality": 5.0}], quality=[0.5]), config("quality", "ADD", 1.0)) == [1.5]


def test_a_row_without_the_number_keeps_its_reward() -> None:
    rows = rewarded([1.0, 2.0, None], [{"a": 1.0}, {}, {"a": 1.0}])
    np.testing.assert_array_equal(shaped(rows, config("a", "ADD", 1.0)), [2.0, 2.0, np.nan])


def test_a_group_of_failed_rollouts_keeps_its_rewards() -> None:
    np.testing.assert_array_equal(shaped(rewarded([None, None]), config("a", "ADD", 1.0)), [np.nan, np.nan])


def test_a_division_by_zero_leaves_no_reward() -> None:
    np.testing.assert_array_equal(shaped(rewarded([1.0], [{"a": 0.0}]), config("a", "DIV", 1.0)), [np.nan])


def test_a_number_that_no_row_has_is_refused_with_the_nearest() -> None:
    with pytest.raises(OperatorError, match=r"'fromat' is neither .*did you mean 'format'"):
        shaped(rewarded([1.0], [{"format": 1.0}]), config("fromat", "ADD", 1.0))


def test_the_length_penalty_falls_linearly_over_the_cache() -> None:
    rows = rewarded([1.0] * 5, response_length=[80, 90, 95, 100, 120])
    columns = LengthPenalty(max_response_length=100, cache_length=10, penalty_factor=2.0).map(rows)
    assert np.asarray(columns["length_penalty"]).tolist() == [0.0, 0.0, -1.0, -2.0, -2.0]
    assert np.asarray(columns["reward"]).tolist() == [1.0, 1.0, 0.0, -1.0, -1.0]


@pytest.mark.parametrize("cache_length", [0, -1, 101])
def test_a_cache_that_does_not_fit_is_refused(cache_length: int) -> None:
    with pytest.raises(OperatorError, match=rf"cache_length is {cache_length}; allowed: 1 to"):
        LengthPenalty(max_response_length=100, cache_length=cache_length)


def test_the_format_bonus_goes_to_responses_that_match() -> None:
    rows = rewarded([1.0, 1.0, 0.0], response_text=["so #### 7", "so 7", None])
    columns = FormatBonus(bonus=0.5).map(rows)
    assert np.asarray(columns["reward"]).tolist() == [1.5, 1.0, 0.0]
    assert np.asarray(columns["format"]).tolist() == [1.0, 0.0, 0.0]


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(OperatorError, match=r"'\(' is not a regular expression"):
        FormatBonus(bonus=1.0, pattern="(")


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("", 1.0),
        ("one two", 1.0),
        ("one two three", 1.0),
        # sequences: aaa aaa aaa
        ("a a a a a", 1 / 3),
        # sequences: abc bca cab abc bca
        ("a b c a b c a", 3 / 5),
        (None, 1.0),
    ],
)
def test_the_share_of_different_three_word_sequences(text: str | None, share: float) -> None:
    assert distinct_share(pa.chunked_array([[text]], pa.string()))[0] == pytest.approx(share)


def test_quality_is_the_mean_of_finished_answered_and_varied() -> None:
    rows = pa.table(
        {
            "response_text": ["3 + 4 = 7 #### 7", "3 + 4 = 7 #### 7", "it is 7", "a a a a a", None],
            "truncated": ["", "response", "", "response", None],
            "error": pa.array([None, None, "", None, "timed out"]),
        }
    )
    quality = np.asarray(QualityScore().map(rows)["quality"])
    np.testing.assert_allclose(quality, [1.0, 2 / 3, 2 / 3, 1 / 9, 1 / 3])


@pytest.mark.parametrize(
    ("text", "answered"),
    [
        (r"so \boxed{7}", True),
        ("<answer> 7 </answer>", True),
        ("####", False),
        ("#### 7", True),
        ("7", False),
    ],
)
def test_a_final_answer_is_recognised(text: str, answered: bool) -> None:
    rows = pa.table({"response_text": [text], "truncated": [""], "error": pa.array([None], pa.string())})
    assert np.asarray(QualityScore().map(rows)["quality"])[0] == pytest.approx(1.0 if answered else 2 / 3)
