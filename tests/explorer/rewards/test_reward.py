"""What a reward function may return, and how functions of each kind are called."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from trinity_data.dataset.row import Columns
from trinity_data.dataset.task import Task
from trinity_data.errors import RolloutError
from trinity_explorer.chat import Reply
from trinity_explorer.engines.engine import Completion, Sampling
from trinity_explorer.rewards.reward import Reward, as_reward, bind_reward, check_reward

MESSAGES = ({"role": "user", "content": "3 + 4?"},)
TASK = Task("t", "sums", "3 + 4?", MESSAGES, "7", "", "", Columns('{"truth": "seven", "prompt": "3 + 4?"}'))
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, min_tokens=0, max_tokens=8, seed=0)
REPLY = Reply("It is 7", [1, 2], Completion([3, 4, 5], [-1.0] * 3, "stop", 9), SAMPLING)


@pytest.mark.parametrize(
    ("value", "total"),
    [
        (1, 1.0),
        (True, 1.0),
        (0.25, 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array(2.0), 2.0),
        (Fraction(1, 4), 0.25),
        (Decimal("0.5"), 0.5),
        (Reward(np.float64(0.5), {"a": 1}), 0.5),
    ],
)
def test_any_finite_number_is_a_reward(value: object, total: float) -> None:
    reward = as_reward(value, "f")
    assert reward.total == total and type(reward.total) is float


def test_a_dict_of_parts_is_their_sum() -> None:
    assert as_reward({"right": 1, "short": np.float32(0.5)}, "f") == Reward(
        1.5, {"right": 1.0, "short": 0.5}, {}
    )


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "f returned None (NoneType); allowed are a finite number"),
        ("good", "f returned 'good' (str)"),
        ([1.0], r"f returned [1.0] (list)"),
        (np.array([1.0, 2.0]), "f returned array([1., 2.]) (ndarray)"),
        (float("nan"), "f returned nan (float)"),
        (float("-inf"), "f returned -inf (float)"),
        (np.float32("inf"), "f returned inf (float32)" if np.__version__ < "2" else (
            "f returned np.float32(inf) "
            "(float32)")),
        (10**400, "f returned 1000"),
        (1j, "f returned 1j (complex)"),
        ({}, "f returned an empty dict"),
        ({"a": None}, "f returned parts with 'a' as None (NoneType)"),
        ({None: 1.0}, "f returned parts with the name None (NoneType)"),
        ({"a": 1e308, "b": 1e308}, "f returned parts whose sum is inf (float)"),
        (Reward("good"), "f returned a Reward whose total is 'good' (str)"),  # type: ignore[arg-type]
        (Reward(1.0, {"a": float("nan")}), "f returned parts with 'a' as nan (float)"),
        (Reward(1.0, [1]), "f returned parts that are [1] (list)"),  # type: ignore[arg-type]
        (Reward(1.0, {}, {"m": "x"}), "f returned metrics with 'm' as 'x' (str)"),  # type: ignore[dict-item]
    ],
)  # fmt: skip
def test_all_else_fails_the_rollout_with_type_and_value(value: object, said: str) -> None:
    with pytest.raises(RolloutError) as error:
        as_reward(value, "f")
    assert str(error.value).startswith(said)


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError


def test_a_value_that_cannot_be_shown_is_reported_by_its_type() -> None:
    with pytest.raises(RolloutError, match=r"a value that cannot be shown \(Unprintable\)"):
        as_reward(Unprintable(), "f")


def reward_of(
    function: Any, *, conversational: bool = False, reply: Reply | str = REPLY, **args: Any
) -> Reward:
    assert check_reward(function, args) == []
    return asyncio.run(bind_reward("f", function, args, conversational=conversational)(reply, TASK))


def text_only(text: str) -> float:
    return float(len(text))


def text_and_answer(response: str, reference: str) -> bool:
    return reference in response


def with_more(text: str, answer: str, *, columns: Any, task: Task, prompt: str, weight: float = 1.0) -> float:
    return weight * (columns["truth"] == "seven") * (task is TASK) * (prompt == TASK.prompt)


def task_second(text: str, task: Task) -> float:
    return float(task.answer)


async def asynchronous(text: str, answer: str) -> float:
    await asyncio.sleep(0)
    return float(answer)


def with_default(text: str, weight: float = 0.5) -> float:
    return weight


@pytest.mark.parametrize(
    ("function", "args", "total"),
    [
        (text_only, {}, 7.0),
        (text_and_answer, {}, 1.0),
        (with_more, {"weight": 3.0}, 3.0),
        (task_second, {}, 7.0),
        (asynchronous, {}, 7.0),
        (with_default, {}, 0.5),
        (with_default, {"weight": 2.0}, 2.0),
        (lambda *args: float(len(args)), {}, 2.0),
    ],
)
def test_a_plain_function_gets_text_and_answer_and_what_it_asks_for(
    function: Callable[..., Any], args: dict[str, Any], total: float
) -> None:
    assert reward_of(function, **args).total == total


def trl_texts(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    assert prompts == ["3 + 4?"] and completions == ["It is 7"]
    assert (
        columns["truth"] == ["seven"]
        and columns["completions_ids"] == [[3, 4, 5]]
        and "prompt" not in columns
    )
    return [0.5 + columns["trainer_state"].global_step]


async def trl_messages(completions: list[Any], truth: list[str], log_metric: Any = None) -> list[float]:
    log_metric("seen", 4.0)
    assert truth == ["seven"]
    return [float(len(completion[0]["content"])) for completion in completions]


def test_a_function_of_trls_kind_is_called_with_lists_of_one() -> None:
    assert reward_of(trl_texts).total == 9.5


def test_in_a_task_set_of_messages_it_gets_messages_as_in_trl() -> None:
    assert reward_of(trl_messages, conversational=True) == Reward(7.0, {}, {"seen": 4.0})


def test_a_function_of_trls_kind_that_returns_no_list_of_one_number_fails() -> None:
    for value, said in (
        ([1.0, 2.0], r"\[1.0, 2.0\] \(list\) for one completion"),
        ([None], "None"),
        (0.5, "0.5"),
    ):
        with pytest.raises(RolloutError, match=f"'f' returned {said}"):
            reward_of(lambda completions, value=value, **_: value)


def test_a_column_that_is_not_there_is_reported_with_the_nearest() -> None:
    def function(completions: list[str], thruth: list[str]) -> list[float]:
        return [1.0]

    said = "it asks for the column 'thruth', which the task set does not have; it has prompt, truth"
    with pytest.raises(RolloutError, match=said):
        reward_of(function)
    (problem,) = check_reward(function, {}, columns=["prompt", "truth"])
    assert problem.startswith(said) and "did you mean 'truth'" in problem
    assert check_reward(trl_texts, {"x": 1}) == []
    assert check_reward(trl_messages, {"x": 1}) == ["it takes no arguments, found 'x'"]


class Rubric:
    """As `verifiers` has it."""

    def __init__(self, funcs: list[Any], weights: list[float], parser: Any = None) -> None:
        self.funcs, self.weights, self.parser = funcs, weights, parser


def exact(completion: list[dict[str, str]], answer: str) -> float:
    return float(answer in completion[-1]["content"])


async def brief(completion: list[dict[str, str]], info: dict[str, Any], **kwargs: Any) -> float:
    assert info["truth"] == "seven" and kwargs["state"]["answer"] == "7"
    return 4.0


def test_a_rubric_is_the_weighted_sum_of_its_functions() -> None:
    reward = reward_of(Rubric([exact, brief], [1.0, 0.5]))
    assert reward == Reward(3.0, {"exact": 1.0, "brief": 2.0}, {"exact": 1.0, "brief": 4.0})


def test_what_cannot_be_called_is_reported() -> None:
    assert "it is 3 (int)" in check_reward(3, {})[0]
    assert "it is the class 'Rubric'" in check_reward(Rubric, {})[0]
    assert "it takes no text" in check_reward(lambda: 1.0, {})[0]
    assert check_reward(Rubric([exact], [1.0]), {"x": 1}) == ["a rubric takes no reward_fn_args, found 'x'"]


def test_a_text_will_do_for_a_reply() -> None:
    assert reward_of(text_and_answer, reply="7").total == 1.0
