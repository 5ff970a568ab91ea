"""Diversity in a group against numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.operators.chat_server import chat_server
from trinity_data.errors import OperatorError
from trinity_operators.base import group_codes
from trinity_operators.diversity import DiversityScore, similar_directions
from trinity_operators.off_loop import leaves_the_loop
from trinity_operators.preparation import prepared
from trinity_operators.runner import run_operators
from trinity_operators.task_execution import declares_resources


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
    return [float(score) for score in np.asarray(operator.map(rows).columns["diversity"])]


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
        with pytest.raises(OperatorError, match="method: embedding needs one of the two"):
            DiversityScore(**args)
    with pytest.raises(OperatorError, match=r"model_path: there is no folder '.*nowhere'"):
        DiversityScore(method="embedding", model_path=str(tmp_path / "nowhere")).prepare()


DIRECTIONS = {"up": "[0, 2]", "right": "[3, 0]", "between": "[3, 4]"}


def test_an_endpoint_embeds_the_responses_and_its_requests_are_counted() -> None:
    rows = answers("aaab", ["up", "right", "between", ""])
    with chat_server(lambda text, _: (200, DIRECTIONS.get(text, "[1, 1]"))) as server:
        operator = DiversityScore("embedding", model="tiny", base_url=server.url)
        with prepared([operator]):
            result = operator.map(rows)
    # cosines: up with right 0, up with between 0.8, right with between 0.6; b is alone
    scores_R = np.asarray(result.columns["diversity"])
    np.testing.assert_allclose(scores_R, [1 - 0.8 / 2, 1 - 0.6 / 2, 1 - 1.4 / 2, np.nan])
    assert result.totals == {"requests": 1.0, "tokens": 4.0}


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((400, ""), "EndpointError: status 400"),
        ((200, "[0, 0]"), "EndpointError: an embedding has no direction: it is 0, or not finite"),
    ],
)
def test_without_embeddings_the_group_has_an_error_and_no_score(answer: tuple[int, str], error: str) -> None:
    rows = answers("aabb", ["up", "right", "broken", "up"]).append_column(
        "experience_id", pa.array(["a0", "a1", "b0", "b1"])
    )

    def reply(text: str, _: int) -> tuple[int, str]:
        return answer if text == "broken" else (200, DIRECTIONS.get(text, "[1, 1]"))

    with chat_server(reply) as server:
        operator = DiversityScore("embedding", model="tiny", base_url=server.url)
        with prepared([operator]), pytest.raises(OperatorError, match=error):
            run_operators(
                [operator], rows, row_kind="experience", id_column="experience_id", stage="s", step=1
            )


def test_no_answer_is_found_before_the_first_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    nowhere = DiversityScore("embedding", model="tiny", base_url="http://127.0.0.1:1/v1")
    with pytest.raises(OperatorError, match=r"model 'tiny' at http://127\.0\.0\.1:1/v1 gives no answer"):
        nowhere.prepare()
    with pytest.raises(OperatorError, match="there is no address of model 'tiny', which is asked for embedd"):
        DiversityScore("embedding", model="tiny").prepare()


def test_a_model_of_its_own_runs_on_resources_of_its_own() -> None:
    own = DiversityScore("embedding", model_path="tiny", num_cpus=2, num_gpus=0.5)
    assert declares_resources(own) and (own.num_cpus, own.num_gpus) == (2, 0.5)
    elsewhere = DiversityScore("embedding", model="tiny", base_url="http://127.0.0.1:1/v1")
    assert leaves_the_loop(elsewhere) and not declares_resources(elsewhere)
    assert not declares_resources(DiversityScore())
