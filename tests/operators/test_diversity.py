"""Diversity in a group against numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from trinity_data.errors import OperatorError
from trinity_operators.base import group_codes
from trinity_operators.diversity import DiversityScore, similar_directions


def answers(
    groups: str,
    texts: list[str | None],
    tokens: list[list[int]] | None = None,
    rollouts: list[int] | None = None,
) -> pa.Table:
    """Rows of a rollout each, where `rollouts` does not number them."""
    return pa.table(
        {
            "group_id": list(groups),
            "rollout": pa.array(rollouts or range(len(texts)), pa.int32()),
            "response_text": pa.array(texts, pa.string()),
            "token_ids": pa.array([[9, *row] for row in tokens or [[]] * len(texts)], pa.list_(pa.int32())),
            "prompt_length": pa.array([1] * len(texts), pa.int32()),
        }
    )


def scores(rows: pa.Table, **args: Any) -> list[float]:
    operator = DiversityScore(**args)
    operator.prepare()
    return [float(score) for score in np.asarray(operator.map(rows)["diversity"])]


def test_exact_counts_the_others_with_another_text() -> None:
    rows = answers("aaabbab", ["x", "x", "y", "x", None, "x", ""])
    # a: x x y x; b: x, none, empty; none is empty
    np.testing.assert_allclose(scores(rows, method="exact"), [1 / 3, 1 / 3, 1.0, 1.0, 0.5, 1 / 3, 0.5])


def test_ngrams_are_compared_as_sets_within_a_group() -> None:
    tokens = [[1, 2, 3], [1, 2, 4], [1, 2, 3], [5], [], []]
    rows = answers("abaabb", ["?"] * 6, tokens)
    # a: {12, 23}, {12, 23}, {5}; b: {12, 24}, {}, {}
    np.testing.assert_allclose(scores(rows), [0.5, 1.0, 0.5, 1.0, 0.5, 0.5])
    # a: {1, 2, 3} twice and {5}; two of the others of three tokens in common would be 2/4
    pair = answers("aa", ["?"] * 2, [[1, 2, 3], [1, 2, 4]])
    np.testing.assert_allclose(scores(pair, ngram_size=1), [0.5, 0.5])
    np.testing.assert_allclose(scores(pair, ngram_size=2), [1 - 1 / 3, 1 - 1 / 3])


@pytest.mark.parametrize("method", ["exact", "ngram"])
def test_turns_of_a_rollout_are_not_compared_with_each_other(method: str) -> None:
    # in a, rollout 0 says x twice, rollout 1 says x and y; b has one rollout of two turns
    texts = ["x", "x", "x", "y", "x", "x"]
    tokens = [[1, 2]] * 3 + [[3, 4]] + [[1, 2]] * 2
    rows = answers("aaaabb", [*texts], tokens, [0, 0, 1, 1, 0, 0])
    # each x of rollout 0 has one x of two; the x of rollout 1 two of two; the y none
    np.testing.assert_allclose(scores(rows, method=method), [0.5, 0.5, 0.0, 1.0, np.nan, np.nan])


def test_a_group_of_one_has_no_score() -> None:
    assert np.isnan(scores(answers("a", ["x"], [[1, 2]])))
    assert np.isnan(scores(answers("a", ["x"]), method="exact"))


def test_directions_are_compared_by_their_cosines() -> None:
    vectors_RD = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.6, 0.8]])
    codes_R, num_groups = group_codes(answers("aaab", [""] * 4))
    np.testing.assert_allclose(similar_directions(vectors_RD, codes_R, num_groups), [1.0, 0.0, 1.0, 0.0])


def test_the_given_model_embeds_the_responses(tiny_model: Path) -> None:
    rows = answers("aaa", ["What is 3 + 4?", "What is 3 + 4?", "Goodbye, and thanks."])
    one, two, other = scores(rows, method="embedding", model_path=str(tiny_model))
    assert one == pytest.approx(two, abs=1e-6)
    # the first two have each other, the third has nobody of its kind
    assert 0 < one < other
    turns = rows.set_column(1, "rollout", pa.array([0, 0, 1], pa.int32()))
    one, two, other = scores(turns, method="embedding", model_path=str(tiny_model))
    assert one == pytest.approx(two, abs=1e-6) and one == pytest.approx(other, abs=1e-6)


def test_a_model_is_given_with_its_method_and_only_with_it(tmp_path: Path) -> None:
    for args in ({"method": "embedding"}, {"model_path": "x"}):
        with pytest.raises(OperatorError, match="method: embedding needs a model_path"):
            DiversityScore(**args)
    with pytest.raises(OperatorError, match=r"model_path: there is no folder '.*nowhere'"):
        DiversityScore(method="embedding", model_path=str(tmp_path / "nowhere")).prepare()
