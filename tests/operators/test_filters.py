"""Filters, each against rows whose outcome was worked out by hand."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from trinity_data.errors import OperatorError
from trinity_operators.base import FilterResult
from trinity_operators.filters import (
    DapoDynamicSampling,
    DifficultyFilter,
    ExactDuplicateFilter,
    InvalidRewardFilter,
    PassRateFilter,
    PromptLengthFilter,
    ResponseLengthFilter,
    RewardFilter,
    RewardStdFilter,
    TruncatedResponseFilter,
    count_steps,
)

GSM8K = Path(__file__).parents[3] / "shared" / "gsm8k" / "train.jsonl"


def group_rows(rewards: list[float | None], groups: str, rollouts: Sequence[int] | None = None) -> pa.Table:
    """Rewards, and a letter for the group of each.

    Each a rollout of its own where `rollouts` does not say otherwise.
    """
    return pa.table(
        {
            "group_id": list(groups),
            "rollout": pa.array(rollouts or range(len(groups)), pa.int32()),
            "reward": pa.array(rewards, pa.float64()),
        }
    )


def metric_rows(
    accuracies: list[float | None], groups: str, key: str = "accuracy", rollouts: Sequence[int] | None = None
) -> pa.Table:
    entries = [[] if a is None else [(key, a)] for a in accuracies]
    return pa.table(
        {
            "group_id": list(groups),
            "rollout": pa.array(rollouts or range(len(groups)), pa.int32()),
            "metrics": pa.array(entries, pa.map_(pa.string(), pa.float64())),
        }
    )


def reasons(result: FilterResult) -> list[str]:
    """Why each dropped row was dropped."""
    if isinstance(result.reason, str):
        return [result.reason] * int((~result.keep).sum())
    return [str(why) for why, keep in zip(result.reason, result.keep, strict=True) if not keep]


def test_a_reward_at_the_threshold_stays() -> None:
    rows = pa.table({"reward": pa.array([0.4, 0.5, 0.6, None, float("nan")])})
    result = RewardFilter(threshold=0.5).apply(rows)
    assert result.keep.tolist() == [False, True, True, False, False]
    assert reasons(result) == ["reward below 0.5", "no reward", "no reward"]


def test_only_finite_rewards_are_valid() -> None:
    rows = pa.table({"reward": pa.array([0.0, None, float("nan"), float("inf"), -1.0])})
    assert InvalidRewardFilter().apply(rows).keep.tolist() == [True, False, False, False, True]


def test_groups_without_variance_are_dropped_whole() -> None:
    rows = group_rows([1.0, 0.0, 1.0, 1.0, 0.0, 5.0], "abaabc")
    result = RewardStdFilter().apply(rows)
    # a = 1, 1, 1; b = 0, 0; c alone
    assert result.keep.tolist() == [False] * 6
    assert reasons(result)[0] == "reward std of the group is not above 0"
    assert reasons(result)[5] == "fewer than two rewards in the group"


def test_the_spread_of_a_group_is_its_population_deviation() -> None:
    rewards, groups = [1.0, 4.0, 2.0, 4.5, 7.0], "ababa"
    result = RewardStdFilter(threshold=2.0).apply(group_rows(rewards, groups))  # type: ignore[arg-type]
    a, b = statistics.pstdev([1.0, 2.0, 7.0]), statistics.pstdev([4.0, 4.5])
    np.testing.assert_allclose(np.asarray(result.value), [a, b, a, b, a], rtol=1e-12)
    assert result.keep.tolist() == [True, False, True, False, True]


def test_equal_rewards_have_no_spread_however_they_add_up() -> None:
    # the mean is 0.10000000000000002, from which each of them differs
    assert np.std([0.1] * 3) > 0
    assert not RewardStdFilter().apply(group_rows([0.1] * 3, "aaa")).keep.any()


def test_a_missing_reward_counts_in_no_spread() -> None:
    result = RewardStdFilter().apply(group_rows([1.0, None, 0.0, 1.0, None], "aaabb"))
    assert result.keep.tolist() == [True, True, True, False, False]
    np.testing.assert_allclose(np.asarray(result.value)[:3], 0.5)


def test_dynamic_sampling_keeps_groups_that_are_partly_right() -> None:
    rows = metric_rows([1, 0, 1, 1, 0, 0], "aabbcc")
    result = DapoDynamicSampling().apply(rows)
    assert result.keep.tolist() == [True, True, False, False, False, False]
    assert (
        reasons(result)
        == ["every answer of the group is right"] * 2 + ["every answer of the group is wrong"] * 2
    )


def test_an_answer_is_right_above_the_threshold_only() -> None:
    rows = metric_rows([0.5, 0.6], "aa", key="f1")
    assert DapoDynamicSampling(metric_key="f1", correct_threshold=0.5).apply(rows).keep.all()
    assert not DapoDynamicSampling(metric_key="f1", correct_threshold=0.6).apply(rows).keep.any()


def test_a_metric_may_be_a_score_column() -> None:
    rows = pa.table({"group_id": ["a", "a"], "rollout": [0, 1], "accuracy": [1.0, 0.0]})
    assert DapoDynamicSampling().apply(rows).keep.all()


def test_a_metric_that_no_row_has_is_refused() -> None:
    with pytest.raises(
        OperatorError, match=r"'acuracy' is neither a score nor a metric.*did you mean 'accuracy'"
    ):
        DapoDynamicSampling(metric_key="acuracy").apply(metric_rows([1, 0], "aa"))


def test_a_group_of_failed_rollouts_counts_as_wrong() -> None:
    result = DapoDynamicSampling().apply(metric_rows([None, None], "aa"))
    assert reasons(result) == ["every answer of the group is wrong"] * 2


def test_pass_rates_lie_within_the_bounds_and_are_scores() -> None:
    rows = metric_rows([1, 0, 0, 0, 1, 1, 1, 0], "aaaabbbb")
    result = PassRateFilter(min_rate=0.5, max_rate=0.8).apply(rows)
    assert result.keep.tolist() == [False] * 4 + [True] * 4
    assert np.asarray(result.scores["pass_rate"]).tolist() == [0.25] * 4 + [0.75] * 4
    assert reasons(result) == ["pass rate of the group below 0.5"] * 4


def test_a_rollout_of_several_turns_counts_once_in_the_spread_of_its_group() -> None:
    # rollout 0 has three turns and reward 1, rollout 1 one turn and reward 0
    rows = group_rows([1.0, 1.0, 1.0, 0.0], "aaaa", rollouts=[0, 0, 0, 1])
    np.testing.assert_allclose(np.asarray(RewardStdFilter().apply(rows).value), 0.5)
    alone = group_rows([1.0, 1.0], "aa", rollouts=[0, 0])
    assert reasons(RewardStdFilter().apply(alone)) == ["fewer than two rewards in the group"] * 2


def test_a_rollout_is_right_when_one_of_its_turns_has_the_metric() -> None:
    # metrics stand on the last turn of a rollout
    rows = metric_rows([None, 1, None, None, 1], "aaaaa", rollouts=[0, 0, 1, 1, 1])
    assert reasons(DapoDynamicSampling().apply(rows)) == ["every answer of the group is right"] * 5
    half = metric_rows([None, None, 1, 0], "aaaa", rollouts=[0, 0, 0, 1])
    assert np.asarray(PassRateFilter().apply(half).value).tolist() == [0.5] * 4


def test_only_a_cut_response_is_truncated() -> None:
    rows = pa.table({"truncated": ["", "response", "prompt", None]})
    assert TruncatedResponseFilter().apply(rows).keep.tolist() == [True, False, True, True]


def test_response_lengths_are_bounded_on_both_sides() -> None:
    rows = pa.table({"response_length": pa.array([0, 1, 5, 6], pa.int32())})
    result = ResponseLengthFilter(min_length=1, max_length=5).apply(rows)
    assert result.keep.tolist() == [False, True, True, False]
    assert reasons(result) == ["response length below 1", "response length above 5"]


def test_prompts_are_measured_in_characters_or_words() -> None:
    rows = pa.table({"prompt": ["a bc", "żółw", "", None]})
    by_characters = PromptLengthFilter(max_length=4).apply(rows)
    np.testing.assert_array_equal(np.asarray(by_characters.value), [4, 4, 0, np.nan])
    assert by_characters.keep.tolist() == [True, True, False, False]
    by_words = PromptLengthFilter(min_length=2, unit="words").apply(rows)
    np.testing.assert_array_equal(np.asarray(by_words.value), [2, 1, 0, np.nan])


@pytest.mark.parametrize(
    ("answer", "steps"),
    [
        ("3+4 = <<3+4=7>>7 apples.\n#### 7", 1),
        ("<<1+1=2>>2 and <<2+2=4>>4\nso <<4*2=8>>8\n#### 8", 3),
        ("first\n\nsecond\n#### 2", 2),
        ("#### 2", 0),
        ("7", None),
        (None, None),
    ],
)
def test_the_steps_of_a_reference_answer(answer: str | None, steps: float | None) -> None:
    num_steps = count_steps(pa.chunked_array([[answer]], pa.string()))[0]
    assert np.isnan(num_steps) if steps is None else num_steps == steps


def test_difficulty_is_a_score_and_a_bound() -> None:
    rows = pa.table({"answer": ["<<1=1>>\n#### 1", "<<1=1>><<2=2>>\n#### 2", "5"]})
    result = DifficultyFilter(min_steps=2).apply(rows)
    assert result.keep.tolist() == [False, True, False]
    np.testing.assert_array_equal(np.asarray(result.scores["difficulty"]), [1, 2, np.nan])
    assert reasons(result) == ["steps of the reference answer: below 2", "no steps of the reference answer"]


@pytest.mark.skipif(not GSM8K.exists(), reason="needs ../shared/gsm8k")
def test_steps_of_gsm8k_are_its_annotations() -> None:
    answers = [json.loads(line)["answer"] for line in GSM8K.read_text().splitlines()]
    expected = []
    for answer in answers:
        annotated = len(re.findall(r"<<[^<>]*>>", answer))
        above = [line for line in answer.split("####")[0].splitlines() if line.strip()]
        expected.append(annotated or len(above))
    assert count_steps(pa.chunked_array([answers])).tolist() == expected


def test_a_repeated_row_is_dropped_within_and_across_tables() -> None:
    operator = ExactDuplicateFilter()
    first = operator.apply(pa.table({"prompt": ["a", "b", "a", "c"]}))
    second = operator.apply(pa.table({"prompt": ["d", "b", "d"]}))
    assert first.keep.tolist() == [True, True, False, True]
    assert second.keep.tolist() == [True, False, False]
    assert reasons(second) == ["same prompt as an earlier row"] * 2


def test_rows_are_compared_by_all_the_columns() -> None:
    rows = pa.table({"a": ["x", "x|", "x", "X"], "b": ["|y", "y", "|y", "|y"], "n": [1, 2, 3, 4]})
    assert ExactDuplicateFilter(columns=["a", "b"]).apply(rows).keep.tolist() == [True, True, False, True]
    assert ExactDuplicateFilter(["a", "b"], ignore_case=True).apply(rows).keep.tolist() == [
        True,
        True,
        False,
        False,
    ]
    assert ExactDuplicateFilter(["a", "b", "n"]).apply(rows).keep.all()


def test_what_an_earlier_table_held_is_a_duplicate() -> None:
    operator = ExactDuplicateFilter()
    assert operator.apply(pa.table({"prompt": ["a"]})).keep.tolist() == [True]
    assert operator.apply(pa.table({"prompt": ["a", "b"]})).keep.tolist() == [False, True]


def test_a_missing_text_is_not_the_text_none() -> None:
    rows = pa.table({"prompt": [None, "\\0", None]})
    assert ExactDuplicateFilter().apply(rows).keep.tolist() == [True, True, False]
