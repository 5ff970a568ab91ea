"""LLM judges: a server on 127.0.0.1 answers late, fails at first, talks nonsense or is silent."""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.operators.chat_server import chat_server
from tests.operators.scripted_engines import ScriptedEngines
from trinity_data.config import TaskPipelineConfig, TasksetConfig
from trinity_data.errors import OperatorError
from trinity_operators.calls import run_calls
from trinity_operators.endpoint import Answer, Messages
from trinity_operators.llm_scores import score_of
from trinity_operators.preparation import prepared
from trinity_operators.registry import build_operator
from trinity_operators.result import Result
from trinity_operators.runner import operator_calls, run_operators
from trinity_operators.task_engines import connect_engines, first_asking
from trinity_operators.task_execution import plan_execution
from trinity_operators.task_filtering import for_evaluation


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


class Grader:
    """A model of the run."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    async def ask(self, messages: Messages, *, max_tokens: int, temperature: float) -> Answer:
        return Answer("Score: 7", 9)


def experiences(num_rows: int) -> pa.Table:
    return pa.table(
        {
            "experience_id": [f"e{number}" for number in range(num_rows)],
            "group_id": ["g"] * num_rows,
            "messages": [
                [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Is {number} odd?"}]
                for number in range(num_rows)
            ],
            "response_text": [f"answer {number}" for number in range(num_rows)],
            "reward": [1.0] * num_rows,
        }
    )


def scored(
    answer: Callable[[str, int], tuple[int, str]],
    num_rows: int = 4,
    *,
    name: str = "judge_score",
    **args: Any,
) -> tuple[Result, int, list[str]]:
    """The result, the most requests at the same time, and all questions but those of the probe."""
    with chat_server(
        lambda text, before: (200, "yes") if text == "Say yes." else answer(text, before)
    ) as server:
        args = {"model": "tiny", "base_url": server.url} | args
        operator = build_operator(name, args, base_dir=Path())
        with prepared([operator]):
            calls = operator_calls(
                [operator], experiences(num_rows), row_kind="experience", id_column="experience_id",
                stage="s", step=1, drops_failures=True,
            )  # fmt: skip
            result = run_calls(calls)
        return result, server.most_in_flight, [text for text in server.questions if text != "Say yes."]


def reasons(result: Result) -> list[str]:
    texts: list[str] = result.decisions["reason"].to_pylist()
    return texts


def number_in(question: str) -> int:
    return next(number for number in range(64) if f"Is {number} odd?" in question)


def test_each_response_has_the_score_and_the_rationale_of_its_own_answer() -> None:
    def answer(question: str, _: int) -> tuple[int, str]:
        number = number_in(question)
        assert f"answer {number}" in question
        return 200, json.dumps({"rationale": f"it is {number}", "score": number})

    result, _, _ = scored(answer)
    assert result.values["judge_score"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert reasons(result) == ["it is 0", "it is 1", "it is 2", "it is 3"]
    (count,) = result.counts
    assert {name: metric.value for name, metric in count.metrics.items()} == {"requests": 4.0, "tokens": 28.0}


def test_many_questions_are_under_way_at_the_same_time_and_no_more_than_allowed() -> None:
    all_there = threading.Barrier(16, timeout=60)

    def late(_: str, __: int) -> tuple[int, str]:
        all_there.wait()
        return 200, "7"

    result, most, _ = scored(late, 64, max_in_flight=16)
    assert result.values["judge_score"].tolist() == [7.0] * 64
    assert most == 16


def test_a_question_that_fails_at_first_is_asked_again() -> None:
    result, _, questions = scored(lambda _, before: (500, "busy") if before == 0 else (200, "Score: 8.5"))
    assert result.values["judge_score"].tolist() == [8.5] * 4
    assert len(questions) == 8


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (
            (200, "I like it"),
            "ValueError: there is no score in the answer 'I like it'; wanted "
            '{"score": <number>, "rationale": "<text>"}, a line `Score: <number>`, or a number alone',
        ),
        (
            (200, '{"grade": 3}'),
            "ValueError: the answer has no number 'score': '{\"grade\": 3}'; wanted {\"score\": <number>, ",
        ),
        ((200, "11"), "ValueError: the score 11 is not from 0 to 10: '11'"),
        ((200, ""), "EndpointError: the answer is empty"),
        ((400, "too long"), "EndpointError: status 400: "),
        ((503, "later"), "EndpointError: status 503: "),
    ],
)
def test_a_response_without_a_score_has_an_error_and_never_a_zero(
    reply: tuple[int, str], reason: str
) -> None:
    result, _, _ = scored(
        lambda question, _: reply if number_in(question) == 1 else (200, "5"), max_retries=1
    )
    assert result.kept.tolist() == [True, False, True, True]
    np.testing.assert_array_equal(result.values["judge_score"], [5, np.nan, 5, 5])
    assert reasons(result)[1].startswith(f"error: {reason}")
    assert result.counts[0].errors == 1


def metrics(result: Result) -> dict[str, float]:
    return {name: metric.value for name, metric in result.counts[0].metrics.items()}


def test_every_request_counts_whatever_becomes_of_its_row() -> None:
    def answer(question: str, before: int) -> tuple[int, str]:
        match number_in(question):
            case 0:
                return 200, "I like it"  # cannot be read
            case 1:
                return (500, "busy") if before == 0 else (200, "11")  # asked again, then not on the scale
            case 2:
                return 503, "later"  # asked twice, without an answer
            case _:
                return 200, ""  # empty, and the server counts its tokens

    result, _, questions = scored(answer, max_retries=1)
    assert not result.kept.any()
    assert metrics(result) == {"errors": 4.0, "requests": 6.0, "tokens": 21.0}
    assert len(questions) == 6


def test_each_request_of_a_rubric_counts_where_one_of_them_fails() -> None:
    def answer(question: str, _: int) -> tuple[int, str]:
        if "- right" in question:
            return 400, "too long"
        time.sleep(0.1)  # is still under way then
        return 200, '{"clear": 2}'

    result, _, _ = scored(answer, 1, name="rubric_score", criteria=CRITERIA, one_by_one=True)
    assert metrics(result) == {"errors": 1.0, "requests": 2.0, "tokens": 7.0}


def test_a_silent_server_is_an_error_of_the_row() -> None:
    def silent(question: str, _: int) -> tuple[int, str]:
        time.sleep(4 if number_in(question) == 2 else 0)
        return 200, "5"

    result, _, _ = scored(silent, timeout=2, max_retries=0)
    assert [text for text in reasons(result) if text] == ["error: EndpointError: no answer within 2 s"]


def test_an_endpoint_that_is_not_there_is_named_before_the_run(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    operator = build_operator("judge_score", {"model": "tiny", "base_url": url}, base_dir=Path())
    with (
        pytest.raises(OperatorError, match=rf"model 'tiny' at {url} gives no answer: .*; start it, or"),
        prepared([operator]),
    ):
        pass
    gc.collect()  # aiohttp reports a session that was not closed when it is deleted
    assert "Unclosed" not in caplog.text
    operator = build_operator("judge_score", {"model": "tiny"}, base_dir=Path())
    with (
        pytest.raises(
            OperatorError, match="there is no address of model 'tiny'; set base_url, or OPENAI_BASE_URL"
        ),
        prepared([operator]),
    ):
        pass


def test_a_model_of_the_run_takes_precedence_over_the_address_in_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    operator = build_operator("judge_score", {"model": "grader"}, base_dir=Path())
    operator.connect_models({"grader": Grader()})
    with prepared([operator]):
        result = run_operators(
            [operator], experiences(2), row_kind="experience", id_column="experience_id", stage="s", step=1
        )
    assert result.values["judge_score"].tolist() == [7.0, 7.0]


def test_the_key_comes_from_the_environment_and_is_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with chat_server(lambda _, __: (401, "no")) as server:
        operator = build_operator("judge_score", {"model": "tiny", "base_url": server.url}, base_dir=Path())
        with (
            pytest.raises(OperatorError, match="set OPENAI_API_KEY in the environment") as caught,
            prepared([operator]),
        ):
            pass
    assert "sk-secret" not in str(caught.value) + repr(vars(operator))


CRITERIA = [
    {"name": "right", "asks": "Is it right?", "weight": 3.0},
    {"name": "clear", "asks": "Is it clear?"},
]


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("judge_score", {"scale": [10, 0]}, r"scale is \[10.0, 0.0\]; the lowest score comes first"),
        ("judge_score", {"max_token": 5}, r"unknown argument 'max_token'.*did you mean 'max_tokens'"),
        ("judge_score", {"criteria": CRITERIA}, "unknown argument 'criteria'"),
        ("rubric_score", {"criteria": []}, "criteria: found .*at least 1 item"),
        ("rubric_score", {"criteria": [CRITERIA[0], CRITERIA[0]]}, "criteria have the names right, right"),
        ("rubric_score", {}, "argument 'criteria' is missing"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(OperatorError, match=message):
        build_operator(name, {"model": "rollout_model"} | args, base_dir=Path())


def test_a_rubric_is_the_weighted_mean_of_its_criteria() -> None:
    def answer(question: str, _: int) -> tuple[int, str]:
        assert "- right: Is it right?\n- clear: Is it clear?" in question
        return 200, '{"right": 8, "clear": "4", "rationale": "mostly"}'

    result, _, questions = scored(answer, 2, name="rubric_score", criteria=CRITERIA)
    assert result.values["rubric_score"].tolist() == [7.0, 7.0]  # (3 × 8 + 4) / 4
    assert result.values["rubric_score_right"].tolist() == [8.0, 8.0]
    assert result.values["rubric_score_clear"].tolist() == [4.0, 4.0]
    assert (reasons(result), len(questions)) == (["mostly", "mostly"], 2)


def test_a_rubric_may_ask_about_each_criterion_alone() -> None:
    def answer(question: str, _: int) -> tuple[int, str]:
        name, score = ("right", 10) if "- right" in question else ("clear", 2)
        return 200, json.dumps({name: score, "rationale": name})

    result, _, questions = scored(answer, 2, name="rubric_score", criteria=CRITERIA, one_by_one=True)
    assert result.values["rubric_score"].tolist() == [8.0, 8.0]
    assert (reasons(result), len(questions)) == (["right clear"] * 2, 4)


def test_a_task_operator_asks_the_model_of_its_stage_where_the_engines_are() -> None:
    judge = build_operator("judge_score", {"model": "grader", "prompt": "{question}"}, base_dir=Path())
    elsewhere = {"model": "grader", "base_url": "http://127.0.0.1:1/v1", "prompt": "{question}"}
    away = build_operator("judge_score", elsewhere, base_dir=Path())
    models = ("rollout_model", "grader")
    assert first_asking([away, judge], models) == "judge_score" and first_asking([away], models) is None
    execution = plan_execution(TaskPipelineConfig(), [judge], Path(), models=models)
    assert str(execution) == "in process: 'judge_score' asks the engines of the stage"
    # tasks of an evaluation are asked as they are
    assert for_evaluation([judge], models) == [] and for_evaluation([away], models) == [away]
    connect_engines([judge, away], ScriptedEngines(by_name={"grader": Grader()}), TasksetConfig(path="x"))
    messages = [[{"role": "user", "content": "What is 1 + 1?"}]]
    rows = pa.table({"task_id": ["t"], "messages": messages})
    with prepared([judge]):
        result = run_operators([judge], rows, row_kind="task", id_column="task_id", stage="s", step=None)
    assert result.values["judge_score"].tolist() == [7.0]


def test_an_answer_without_one_criterion_is_an_error() -> None:
    result, _, _ = scored(lambda _, __: (200, '{"right": 8}'), 1, name="rubric_score", criteria=CRITERIA)
    assert reasons(result) == [
        "error: ValueError: the answer has no number 'clear': '{\"right\": 8}'; "
        'wanted {"right": <number>, "clear": <number>, "rationale": "<text>"}'
    ]


def test_the_answer_to_a_question_about_one_criterion_has_its_name_alone() -> None:
    result, _, _ = scored(
        lambda _, __: (200, "Score: 7"), 1, name="rubric_score", criteria=CRITERIA, one_by_one=True
    )
    assert reasons(result) == [
        "error: ValueError: there is no JSON object in the answer 'Score: 7'; "
        'wanted {"right": <number>, "rationale": "<text>"}'
    ]


@pytest.mark.parametrize(
    ("text", "score", "rationale"),
    [
        (" 7 ", 7.0, ""),
        ("Good.\nScore: 7/10", 7.0, "Good.\nScore: 7/10"),
        ('First {"score": 1}, then {"score": 2.5, "rationale": "better"}', 2.5, "better"),
    ],
)
def test_a_score_is_read_from_json_a_line_or_a_number_alone(text: str, score: float, rationale: str) -> None:
    assert score_of(text) == (score, rationale)
