"""Operators that ask a model: a server on 127.0.0.1 answers, fails, talks nonsense or is silent."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.operators.chat_server import chat_server
from tests.operators.data_juicer_observation import ANSWER, ARGUMENTS, NOTES
from trinity_data.errors import OperatorError
from trinity_data.synthetic.model import write_model
from trinity_operators.base import Operator
from trinity_operators.data_juicer.catalogue import catalogue
from trinity_operators.data_juicer.model_calls import MAY_FIND_NOTHING, _at_work, asked_about
from trinity_operators.endpoint import Answer, Messages
from trinity_operators.preparation import prepared
from trinity_operators.registry import build_operator
from trinity_operators.result import Result
from trinity_operators.runner import run_operators

DIMENSIONS = ["linguistic_complexity", "conceptual_depth", "prior_knowledge", "step_complexity", "ambiguity"]
READABLE: dict[str, tuple[dict[str, Any], str]] = {
    "llm_condition_filter": ({}, "yes"),
    "text_embd_similarity_filter": ({"max_score": 1.01}, ""),
}
"""Arguments and answers with which an operator keeps its rows."""
PROMPTS = [f"What is {number} + {number}?" for number in range(8)]


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_API_URL", "DASHSCOPE_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def scores(points: int) -> str:
    return json.dumps({"dimension_scores": dict.fromkeys(DIMENSIONS, points), "rationale": "so"})


def asking(url: str, name: str = "llm_difficulty_score_filter", **args: Any) -> Operator:
    params = {"base_url": url} | args.pop("model_params", {})
    return build_operator(name, {"model_params": params} | args, base_dir=Path())


def run(operator: Operator, prompts: list[str] = PROMPTS) -> Result:
    ids = [f"t{i}" for i in range(len(prompts))]
    rows = pa.table({"task_id": ids, "prompt": prompts, "answer": ["1"] * len(prompts)})
    return run_operators([operator], rows, row_kind="task", id_column="task_id", stage="s", step=None)


def reasons(result: Result) -> list[str]:
    texts: list[str] = result.decisions["reason"].to_pylist()
    return texts


def test_each_row_has_the_score_of_its_own_answer() -> None:
    def answer(question: str, _: int) -> tuple[int, str]:
        return 200, scores(next(n for n in range(8) if f"What is {n} " in question) % 5 + 1)

    with chat_server(answer) as server:
        result = run(asking(server.url, min_score=0.5))
    # points of 1 to 5, as a share of 5
    assert result.values["llm_difficulty_score"].tolist() == [0.2, 0.4, 0.6, 0.8, 1.0, 0.2, 0.4, 0.6]
    assert result.kept.tolist() == [False, False, True, True, True, False, False, True]
    assert reasons(result)[0] == "llm_difficulty_score 0.2 outside [0.5, 1.0]"
    record = json.loads(result.survivors["llm_difficulty_record"][0].as_py())
    assert record["dimension_scores"]["ambiguity"] == 3
    (count,) = result.counts
    assert {name: metric.value for name, metric in count.metrics.items()} == {
        "requests": 8,
        "tokens": 56,
        "rows_without_answer": 0,
    }


def test_a_model_of_the_run_answers_where_there_is_no_address() -> None:
    class Grader:
        def __init__(self) -> None:
            self.asked: list[str] = []

        async def start(self) -> None: ...
        async def stop(self) -> None: ...

        async def ask(self, messages: Messages, *, max_tokens: int, temperature: float) -> Answer:
            assert (max_tokens, temperature) == (64, 0.5)
            self.asked.append(messages[-1]["content"])
            return Answer(scores(4), 7)

    args = {"api_or_hf_model": "grader", "sampling_params": {"max_tokens": 64, "temperature": 0.5}}
    operator = build_operator("llm_difficulty_score_filter", args, base_dir=Path())
    grader = Grader()
    operator.connect_models({"rollout_model": Grader(), "grader": grader})
    result = run(operator)
    assert result.values["llm_difficulty_score"].tolist() == [0.8] * 8
    assert all(any(prompt in text for text in grader.asked) for prompt in PROMPTS)
    assert result.counts[0].metrics["tokens"].value == 56


@pytest.mark.parametrize(("args", "most"), [({}, 8), ({"num_proc": 3}, 3)])
def test_as_many_rows_are_asked_about_at_once(args: dict[str, Any], most: int) -> None:
    together = threading.Barrier(most)

    def answer(question: str, _: int) -> tuple[int, str]:
        if most == 8:
            together.wait(20)  # breaks where fewer than `most` come
        return 200, scores(4)

    with chat_server(answer) as server:
        result = run(asking(server.url, **args))
    assert result.kept.all()
    assert server.most_in_flight <= most


def test_a_server_that_fails_once_is_asked_again() -> None:
    with chat_server(lambda _, before: (200 if before else 500, scores(4))) as server:
        result = run(asking(server.url))
    assert result.values["llm_difficulty_score"].tolist() == [0.8] * 8
    assert len(server.questions) == 16


def test_a_server_that_goes_on_failing_is_an_error_on_the_row_and_no_score() -> None:
    def answer(question: str, _: int) -> tuple[int, str]:
        return (500, "") if "What is 3" in question else (200, scores(4))

    with chat_server(answer) as server:
        result = run(asking(server.url, model_params={"max_retries": 1}))
        assert sum("What is 3" in question for question in server.questions) == 2
    assert result.kept.tolist() == [number != 3 for number in range(8)]
    np.testing.assert_array_equal(
        result.values["llm_difficulty_score"], [0.8, 0.8, 0.8, np.nan, 0.8, 0.8, 0.8, 0.8]
    )
    assert reasons(result)[3].startswith(
        "error: llm_difficulty_score_filter got no answer: InternalServerError: Error code: 500"
    )
    assert result.counts[0].errors == 1


def test_an_answer_that_cannot_be_read_is_an_error_on_the_row() -> None:
    with chat_server(
        lambda question, _: (200, "I would say four." if "1 + 1" in question else scores(4))
    ) as server:
        result = run(asking(server.url, try_num=2))
        assert sum("1 + 1" in question for question in server.questions) == 2
    assert (
        reasons(result)[1] == "error: llm_difficulty_score_filter cannot read the answer 'I would say four.'"
    )
    assert np.isnan(result.values["llm_difficulty_score"][1])


def test_a_silent_server_is_waited_for_so_long_and_no_longer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        params = {"timeout": 0.2, "max_retries": 0}
        result = run(asking(url, model_params=params), PROMPTS[:2])
    assert result.kept.tolist() == [False, False]
    assert (
        reasons(result)
        == ["error: llm_difficulty_score_filter got no answer: APITimeoutError: Request timed out."] * 2
    )


def test_no_server_is_found_before_the_first_row() -> None:
    operator = asking("http://127.0.0.1:1/v1", api_or_hf_model="scorer", model_params={"max_retries": 0})
    with pytest.raises(OperatorError) as caught, prepared([operator]):
        pass
    assert str(caught.value) == (
        "operators[0]: model 'scorer' at http://127.0.0.1:1/v1/chat/completions gives no answer: "
        "APIConnectionError: Connection error.; start it, or set model_params.base_url (or OPENAI_BASE_URL) "
        "and OPENAI_API_KEY"
    )


def test_a_server_that_answers_is_asked_once_before_the_first_row() -> None:
    with chat_server(lambda *_: (200, "Yes.")) as server:
        with prepared([asking(server.url)]):
            pass
        assert server.questions == ["Say yes."]


def test_a_mapper_without_an_answer_drops_the_row_with_the_error() -> None:
    def answer(question: str, _: int) -> tuple[int, str]:
        return (500, "") if "2 + 2" in question else (200, "【问题】\nHow much is it?")

    with chat_server(answer) as server:
        result = run(asking(server.url, "calibrate_query_mapper", model_params={"max_retries": 0}))
    assert result.kept.tolist() == [number != 2 for number in range(8)]
    assert reasons(result)[2].startswith("error: calibrate_query_mapper got no answer: InternalServerError")
    assert [bool(reason) for reason in reasons(result)].count(True) == result.counts[0].errors == 1
    assert all("How much is it?" in text for text in result.survivors["prompt"].to_pylist())


def test_a_score_that_no_answer_holds_is_an_error_and_no_zero() -> None:
    def answer(question: str, _: int) -> tuple[int, str]:
        return 200, '{"rationale": "so"}' if "1 + 1" in question else ANSWER

    with chat_server(answer) as server:
        result = run(asking(server.url, "llm_analysis_filter"))
    # Data-Juicer keeps a row with the score 0
    assert result.kept.tolist() == [number != 1 for number in range(8)]
    assert reasons(result)[1] == 'error: llm_analysis_filter cannot read the answer \'{"rationale": "so"}\''
    assert np.isnan(result.values["llm_analysis_score"][1])


def test_a_condition_is_met_not_met_or_not_answered() -> None:
    def answer(question: str, _: int) -> tuple[int, str]:
        return 200, "Perhaps." if "1 + 1" in question else "Yes." if "2 + 2" in question else " no"

    with chat_server(answer) as server:
        result = run(asking(server.url, "llm_condition_filter", condition="It is even."))
    assert result.kept.tolist() == [number == 2 for number in range(8)]
    assert reasons(result)[:3] == [
        "llm_condition_filter_result False refused by llm_condition_filter",
        "error: llm_condition_filter asks for yes or no, found 'Perhaps.'",
        "",
    ]
    assert result.counts[0].errors == 1


def test_an_answer_that_an_operator_fails_on_is_an_error_of_its_row() -> None:
    def work() -> None:
        _at_work.calls.requests, _at_work.calls.answer = 1, "so so"
        raise KeyError("label")

    row = asked_about(work)
    assert (row.result, row.calls.error) == (None, "the answer 'so so' cannot be used: KeyError: 'label'")
    with pytest.raises(ZeroDivisionError):
        asked_about(lambda: 1 / 0)


ASKING = [name for name, entry in catalogue()["operators"].items() if entry["status"] == "endpoint"]
TAKE_ANY_TEXT = {
    "agent_skill_insight_mapper",
    "calibrate_query_mapper",
    "calibrate_response_mapper",
    "extract_support_text_mapper",
    "llm_extract_mapper",
    "most_relevant_entities_aggregator",
    "nested_aggregator",
    "optimize_prompt_mapper",
    "optimize_query_mapper",
    "optimize_response_mapper",
    "text_embd_similarity_filter",
    *MAY_FIND_NOTHING,
}
"""Operators to which no text is wrong, or that take what they cannot read for nothing found."""


@pytest.mark.parametrize("name", ASKING)
def test_every_operator_drops_the_rows_without_a_usable_answer_and_no_others(
    name: str, tiny_model: Path
) -> None:
    texts = [
        f"{who} buys {what}." for who in ("Ann", "Bob") for what in ("apples", "BROKEN cups", "ODD caps")
    ]
    notes = [dict.fromkeys(NOTES, text) | {"agent_tool_types": [text]} for text in texts]
    rows = pa.table(
        {
            "task_id": list("abcdef"),
            "prompt": texts,
            "answer": texts,
            "history": pa.array([[[text, "Well."]] for text in texts]),
            "__dj__meta__": [json.dumps(note) for note in notes],
            "third": [text.split()[2] for text in texts],
        }
    )
    args = ARGUMENTS.get(name, {})
    if is_aggregator := name.endswith("_aggregator"):
        processor = {"processor_config": {"pretrained_model_name_or_path": str(tiny_model)}}
        args = args | {"model_params": processor}
    if name in READABLE:
        args = args | READABLE[name][0]
    text = READABLE[name][1] if name in READABLE else ANSWER

    def answer(question: str, _: int) -> tuple[int, str]:
        if "BROKEN" in question:
            return 500, ""
        return 200, "I would say so, {" if "ODD" in question else text

    with chat_server(answer) as server:
        params = {"max_retries": 0} | args.get("model_params", {})
        operator = asking(server.url, name, **args | {"model_params": params})
        groups = build_operator("key_value_grouper", {"group_by_keys": ["third"]}, base_dir=Path())
        chain = [groups, operator] if is_aggregator else [operator]
        result = run_operators(chain, rows, row_kind="task", id_column="task_id", stage="s", step=None)
    last = [row for row in result.decisions.to_pylist() if row["position"] == len(chain) - 1]
    for row, text in zip(last, texts, strict=True):
        failed, unusable = "BROKEN" in text, "ODD" in text and name not in TAKE_ANY_TEXT
        assert row["kept"] != (failed or unusable), row["reason"]
        assert row["reason"].startswith(f"error: {name} got no answer: InternalServerError") == failed
        assert row["reason"].startswith("error: ") == (failed or unusable)
        assert ("I would say so, {" in row["reason"]) == unusable
    assert result.counts[-1].errors == (2 if name in TAKE_ANY_TEXT else 4)


@pytest.mark.parametrize("value", [0, "many"])
def test_the_rows_in_flight_are_a_number(value: Any) -> None:
    with pytest.raises(OperatorError, match="num_proc"):
        asking("http://127.0.0.1:1/v1", num_proc=value)


def test_a_key_is_asked_for_where_the_address_is_openais() -> None:
    operator = build_operator("llm_difficulty_score_filter", {}, base_dir=Path())
    with (
        pytest.raises(OperatorError, match=r"the model cannot be asked: Missing credentials.*OPENAI_API_KEY"),
        prepared([operator]),
    ):
        pass


def answers(text: str) -> Callable[[str, int], tuple[int, str]]:
    return lambda *_: (200, text)


def test_an_aggregator_asks_once_for_each_group(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", corpus=["cats and dogs"], seed=0)
    processor = {"processor_config": {"pretrained_model_name_or_path": str(model)}}
    with chat_server(answers("**cats归类为animals**")) as server:
        groups = build_operator("naive_grouper", {}, base_dir=Path())
        tags = pa.array(['{"tag": "cats"}', '{"tag": "dogs"}'])
        rows = pa.table({"task_id": ["a", "b"], "prompt": ["x", "y"], "__dj__meta__": tags})
        aggregator = asking(server.url, "meta_tags_aggregator", meta_tag_key="tag", model_params=processor)
        result = run_operators(
            [groups, aggregator], rows, row_kind="task", id_column="task_id", stage="s", step=None
        )
    assert len(server.questions) == 1
    assert result.kept.all()
    notes = [json.loads(text) for text in result.survivors["__dj__meta__"].to_pylist()]
    assert notes == [{"tag": "animals"}, {"tag": "dogs"}]
