"""What a rollout earned, and how reward functions of each kind are called: plain ones, TRL's, rubrics.

A reward is finite or there is none: whatever else a function returns fails the rollout, with its type
and value. The signature decides how a function is called. It is called for one rollout at a time; one that
is written for batches gets lists of one.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from types import SimpleNamespace
from typing import Any

from trinity_data.dataset.task import Task
from trinity_data.errors import RolloutError, did_you_mean
from trinity_data.parameters import Parameters, parameters_of
from trinity_explorer.chat import Reply

ALLOWED = (
    "allowed are a finite number, a dict of finite numbers by name (their sum is the reward), and a Reward"
)
MAX_SHOWN = 80

FOR_TRL = ("prompts", "completions", "completions_ids", "completion_ids")
"""A function with one of these parameters is called as TRL's GRPOTrainer calls it."""
TRL_SUPPLIED = (*FOR_TRL, "trainer_state", "log_metric", "log_extra")
PLAIN_SUPPLIED = ("task", "columns", "prompt", "messages")
"""What a plain function may ask for by name, after the text and the reference answer."""


@dataclass(frozen=True)
class Reward:
    """The reward of one response, its parts by name, and the metrics that are not part of the sum."""

    total: float
    parts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


def as_reward(value: object, who: str) -> Reward:
    """What `who` returned, as a Reward of floats. Raises RolloutError with the type and value found."""
    if type(value) is Reward and type(value.parts) is type(value.metrics) is dict and _holds_floats(value):
        return value
    if isinstance(value, Reward):
        total = _finite(value.total, f"{who} returned a Reward whose total is")
        return Reward(total, _numbers(value.parts, who, "parts"), _numbers(value.metrics, who, "metrics"))
    if isinstance(value, Mapping):
        parts = _numbers(value, who, "parts")
        if not parts:
            raise RolloutError(f"{who} returned an empty dict; {ALLOWED}")
        return Reward(_finite(sum(parts.values()), f"{who} returned parts whose sum is"), parts)
    return Reward(_finite(value, f"{who} returned"))


def _holds_floats(reward: Reward) -> bool:
    """Whether nothing is to be done: so it is nearly always, and thousands of times a second."""
    total = reward.total
    if type(total) is not float:
        return False
    for named in (reward.parts, reward.metrics):
        for name, value in named.items():
            if type(name) is not str or type(value) is not float:
                return False
            # one that is not finite makes the sum so
            total += value
    return math.isfinite(total)


def shown(value: object) -> str:
    """The value and its type for a message, cut short, whatever its `repr` does."""
    try:
        text = repr(value)
    except Exception:  # the boundary to a repr of other people's
        text = "a value that cannot be shown"
    cut = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
    return f"{cut} ({type(value).__name__})"


def _finite(value: Any, said: str) -> float:
    """A Python or numpy number, or an array or tensor without dimensions, as a float."""
    if type(value) is float and math.isfinite(value):
        return value
    number = math.inf
    is_scalar = getattr(value, "shape", None) == () and callable(getattr(value, "item", None))
    plain = value.item() if is_scalar else value
    if isinstance(plain, numbers.Real | Decimal):
        with suppress(OverflowError, ValueError):  # an integer beyond float64; Decimal('sNaN')
            number = float(plain)
    if not math.isfinite(number):
        raise RolloutError(f"{said} {shown(value)}; {ALLOWED}")
    return number


def _numbers(values: object, who: str, what: str) -> Mapping[str, float]:
    if not values and isinstance(values, Mapping):
        return {}
    if not isinstance(values, Mapping):
        raise RolloutError(
            f"{who} returned {what} that are {shown(values)}; a dict of numbers by name is allowed"
        )
    for name in values:
        if not isinstance(name, str):
            raise RolloutError(f"{who} returned {what} with the name {shown(name)}; names are text")
    return {name: _finite(value, f"{who} returned {what} with {name!r} as") for name, value in values.items()}


@dataclass(frozen=True)
class BoundReward:
    """A reward function with its arguments.

    Awaited with a reply (or a text) and the task, it gives a Reward.
    """

    name: str
    call: Callable[[Reply | str, Task], Any]

    async def __call__(self, reply: Reply | str, task: Task) -> Reward:
        value = self.call(reply, task)
        if not isinstance(value, Reward) and inspect.isawaitable(value):
            value = await value
        return as_reward(value, f"the reward function {self.name!r}")


def bind_reward(
    name: str, reward: Any, args: Mapping[str, Any], *, conversational: bool = False
) -> BoundReward:
    """`conversational`: functions of TRL's kind get lists of messages instead of texts,
    as TRL does it by data set.
    """
    if _is_rubric(reward):
        return BoundReward(name, partial(_call_rubric, reward, args))
    if _is_for_trl(reward):
        return BoundReward(name, partial(_call_trl, name, reward, args, conversational))
    return BoundReward(name, _plain_call(reward, args))


def check_reward(reward: Any, args: Mapping[str, Any], columns: Collection[str] | None = None) -> list[str]:
    """What is wrong with a reward function and its arguments, in words.

    `columns` are the task set's, if known.
    """
    # needs pydantic, which a process that only calls rewards does not load
    from trinity_data.arguments import check_arguments

    if _is_rubric(reward):
        return [f"a rubric takes no reward_fn_args, found {name!r}" for name in args]
    if inspect.isclass(reward):
        return [f"it is the class {reward.__name__!r}; name a function, or an instance that can be called"]
    if not callable(reward):
        return [f"it is {shown(reward)}; a function is allowed, or a rubric with funcs and weights"]
    if _is_for_trl(reward):
        parameters = parameters_of(reward)
        from_columns = [name for name in parameters.required if name not in (*TRL_SUPPLIED, *args)]
        supplied = [name for name in (*TRL_SUPPLIED, *from_columns) if name in parameters.by_name]
        known_columns = from_columns if columns is None else columns
        problems = [_no_column(name, known_columns) for name in from_columns if name not in known_columns]
        return problems + check_arguments(reward, args, supplied=supplied).sentences
    by_name, positional = _signature(reward, args)
    if positional < 1:
        return ["it takes no text; write `def reward(text, answer): ...`"]
    supplied = [name for name in PLAIN_SUPPLIED if name in by_name]
    return check_arguments(reward, args, positional=positional, supplied=supplied).sentences


def is_async(reward: Any) -> bool:
    """Whether the function, the callable object, or a function of the rubric is `async`."""
    functions = [function for function, _ in _rubric_functions(reward)] if _is_rubric(reward) else [reward]
    called = [each if inspect.isroutine(each) else getattr(each, "__call__", each) for each in functions]  # noqa: B004
    return any(map(inspect.iscoroutinefunction, [*functions, *called]))


# -- plain functions: f(text, answer, **args) ----------------------------------------------------------------


def _plain_call(reward: Callable[..., Any], args: Mapping[str, Any]) -> Callable[[Reply | str, Task], Any]:
    by_name, positional = _signature(reward, args)
    supplied_names = [name for name in PLAIN_SUPPLIED if name in by_name and name not in args]
    own_args = dict(args)

    def call(reply: Reply | str, task: Task) -> Any:
        text = reply if isinstance(reply, str) else reply.text
        supplied = {name: task if name == "task" else getattr(task, name) for name in supplied_names}
        return reward(*(text, task.answer)[:positional], **own_args, **supplied)

    return call


def _signature(
    reward: Callable[..., Any], args: Mapping[str, Any]
) -> tuple[Mapping[str, inspect.Parameter], int]:
    """Parameters by name, and how many of text and answer are given by position.

    The second one is the answer unless it is one of PLAIN_SUPPLIED,
    an argument that was given, or has a default.
    """
    try:
        parameters = list(inspect.signature(reward).parameters.values())
    except (TypeError, ValueError):  # written in C, without a signature
        return {}, 2
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return {each.name: each for each in parameters}, 2
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    count = len(by_position[:1])
    for second in by_position[1:2]:
        has_default = second.default is not second.empty and second.name != "answer"
        count += not (has_default or second.name in PLAIN_SUPPLIED or second.name in args)
    return {each.name: each for each in parameters}, count


# -- functions of TRL's kind: f(prompts, completions, **columns) -> one number for each ----------------------


def _is_for_trl(reward: Any) -> bool:
    try:
        names = inspect.signature(reward).parameters
    except (TypeError, ValueError):
        return False
    return any(name in names for name in FOR_TRL)


def _no_column(name: str, columns: Collection[str]) -> str:
    known_columns = ", ".join(sorted(columns)) or "none"
    return (
        f"it asks for the column {name!r}, which the task set does not have; "
        f"it has {known_columns}{did_you_mean(name, columns)}"
    )


async def _call_trl(
    name: str, reward: Any, args: Mapping[str, Any], conversational: bool, reply: Reply | str, task: Task
) -> Reward:
    text = reply if isinstance(reply, str) else reply.text
    tokens = [] if isinstance(reply, str) else [reply.completion.token_ids]
    version = 0 if isinstance(reply, str) else reply.completion.model_version
    metrics: dict[str, float] = {}
    supplied = {column: [value] for column, value in task.columns.items() if column != "prompt"} | {
        "prompts": [list(map(dict, task.messages)) if conversational else task.prompt],
        "completions": [[{"role": "assistant", "content": text}] if conversational else text],
        "completions_ids": tokens,
        "completion_ids": tokens,
        "trainer_state": SimpleNamespace(global_step=version),
        "log_metric": lambda key, value: metrics.__setitem__(key, value),
        "log_extra": lambda *_: None,
    }
    parameters = parameters_of(reward)
    call_args = _accepted(supplied, parameters) | dict(args)
    for required in parameters.required:
        if required not in call_args:
            raise RolloutError(f"the reward function {name!r}: {_no_column(required, task.columns)}")
    value = reward(**call_args)
    if inspect.isawaitable(value):
        value = await value
    who = f"the reward function {name!r}"
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, list | tuple) or len(values) != 1:
        raise RolloutError(
            f"{who} returned {shown(value)} for one completion; a list of one number is allowed"
        )
    return as_reward(Reward(as_reward(values[0], who).total, {}, metrics), who)


def _accepted(supplied: Mapping[str, Any], parameters: Parameters) -> dict[str, Any]:
    """Those of the supplied arguments that a function has parameters for."""
    if parameters.takes_any:
        return dict(supplied)
    return {name: supplied[name] for name in parameters.by_name if name in supplied}


# -- rubrics: functions and weights; a function names what it wants to know ----------------------------------


def _is_rubric(reward: Any) -> bool:
    return not inspect.isroutine(reward) and not inspect.isclass(reward) and bool(_rubric_functions(reward))


def _rubric_functions(rubric: Any) -> list[tuple[Callable[..., Any], float]]:
    """The functions of a rubric with their weights, under the names that releases of `verifiers` have had."""
    for functions, weights in (("funcs", "weights"), ("reward_funcs", "reward_weights")):
        calls = getattr(rubric, functions, None)
        if isinstance(calls, list | tuple) and all(map(callable, calls)):
            return list(zip(calls, getattr(rubric, weights, None) or [1.0] * len(calls), strict=True))
    return []


async def _call_rubric(rubric: Any, args: Mapping[str, Any], reply: Reply | str, task: Task) -> Reward:
    """The weighted sum. Parts are weight × value, metrics the values as they are."""
    text = reply if isinstance(reply, str) else reply.text
    parts: dict[str, float] = {}
    metrics: dict[str, float] = {}
    for function, weight in _rubric_functions(rubric):
        name = getattr(function, "__name__", type(function).__name__)
        # of each function its own copies
        prompt, completion = list(map(dict, task.messages)), [{"role": "assistant", "content": text}]
        state = {"prompt": prompt, "completion": completion, "answer": task.answer, "task": task.taskset}
        info = dict(task.columns)
        more = {"info": info, "parser": getattr(rubric, "parser", None), "state": state | {"info": info}}
        value = function(**_accepted(state | more, parameters_of(function)))
        if inspect.isawaitable(value):
            value = await value
        metrics[name] = as_reward(value, f"the rubric's function {name!r}").total
        parts[name] = float(weight) * metrics[name]
    return Reward(sum(parts.values()), parts, metrics)
