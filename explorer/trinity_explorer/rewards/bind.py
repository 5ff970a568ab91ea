"""How reward functions are called: ours and plain ones, those written for TRL, and rubric objects.

The signature decides. A function is called for one rollout at a time;
one written for batches gets lists of one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from trinity_data.arguments import Parameters, check_arguments, parameters_of
from trinity_data.dataset.task import Task
from trinity_data.errors import RolloutError, did_you_mean
from trinity_explorer.reply import Reply
from trinity_explorer.rewards.reward import Reward, as_reward, shown

FOR_TRL = ("prompts", "completions", "completions_ids", "completion_ids")
"""A function with one of these parameters is called as TRL's GRPOTrainer calls it."""
TRL_SUPPLIED = (*FOR_TRL, "trainer_state", "log_metric", "log_extra")
PLAIN_SUPPLIED = ("task", "columns", "prompt", "messages")
"""What a plain function may ask for by name, after the text and the reference answer."""
RUBRIC_SUPPLIED = ("prompt", "completion", "answer", "state", "task", "info", "parser")


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
    if _is_rubric(reward):
        return [f"a rubric takes no reward_fn_args, found {name!r}" for name in args]
    if inspect.isclass(reward):
        return [f"it is the class {reward.__name__!r}; name a function, or an instance that can be called"]
    if not callable(reward):
        return [f"it is {shown(reward)}; a function is allowed, or a rubric with funcs and weights"]
    if _is_for_trl(reward):
        return list(_problems_of_trl(reward, args, columns))
    by_name, positional = _signature(reward, args)
    if positional < 1:
        return ["it takes no text; write `def reward(text, answer): ...`"]
    supplied = [name for name in PLAIN_SUPPLIED if name in by_name]
    return check_arguments(reward, args, positional=positional, supplied=supplied).sentences


# -- plain functions: f(text, answer, **args) ----------------------------------------------------------------


def _plain_call(reward: Callable[..., Any], args: Mapping[str, Any]) -> Callable[[Reply | str, Task], Any]:
    by_name, positional = _signature(reward, args)
    wanted = [name for name in PLAIN_SUPPLIED if name in by_name and name not in args]
    given = dict(args)

    def call(reply: Reply | str, task: Task) -> Any:
        text = reply if isinstance(reply, str) else reply.text
        more = {name: task if name == "task" else getattr(task, name) for name in wanted}
        return reward(*(text, task.answer)[:positional], **given, **more)

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


def _problems_of_trl(
    reward: Callable[..., Any], args: Mapping[str, Any], columns: Collection[str] | None
) -> Iterator[str]:
    parameters = parameters_of(reward)
    unsupplied = [name for name in parameters.required if name not in TRL_SUPPLIED and name not in args]
    if columns is not None:
        for name in unsupplied:
            if name not in columns:
                yield _no_column(name, columns)
    own = [*TRL_SUPPLIED, *unsupplied]
    yield from check_arguments(
        reward, args, supplied=[name for name in own if name in parameters.by_name]
    ).sentences


def _no_column(name: str, columns: Collection[str]) -> str:
    known = ", ".join(sorted(columns)) or "none"
    return (
        f"it asks for the column {name!r}, which the task set does not have; "
        f"it has {known}{did_you_mean(name, columns)}"
    )


async def _call_trl(
    name: str, reward: Any, args: Mapping[str, Any], conversational: bool, reply: Reply | str, task: Task
) -> Reward:
    metrics: dict[str, float] = {}
    offered = _offered_to_trl(reply, task, conversational) | {
        "log_metric": lambda key, value: metrics.__setitem__(key, value),
        "log_extra": lambda *_: None,
    }
    parameters = parameters_of(reward)
    given = (
        offered
        if parameters.takes_any
        else {key: offered[key] for key in parameters.by_name if key in offered}
    )
    for missing in parameters.required:
        if missing not in given and missing not in args:
            raise RolloutError(f"the reward function {name!r}: {_no_column(missing, task.columns)}")
    value = reward(**(given | dict(args)))
    if inspect.isawaitable(value):
        value = await value
    who = f"the reward function {name!r}"
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, list | tuple) or len(values) != 1:
        raise RolloutError(
            f"{who} returned {shown(value)} for one completion; a list of one number is allowed"
        )
    return as_reward(Reward(as_reward(values[0], who).total, {}, metrics), who)


def _offered_to_trl(reply: Reply | str, task: Task, conversational: bool) -> dict[str, Any]:
    text = reply if isinstance(reply, str) else reply.text
    tokens = [] if isinstance(reply, str) else [reply.completion.token_ids]
    version = 0 if isinstance(reply, str) else reply.completion.model_version
    columns = {name: [value] for name, value in task.columns.items() if name != "prompt"}
    return columns | {
        "prompts": [list(map(dict, task.messages)) if conversational else task.prompt],
        "completions": [[{"role": "assistant", "content": text}] if conversational else text],
        "completions_ids": tokens,
        "completion_ids": tokens,
        "trainer_state": SimpleNamespace(global_step=version),
    }


# -- rubrics: functions and weights; a function names what it wants to know ----------------------------------


def _is_rubric(reward: Any) -> bool:
    return not inspect.isroutine(reward) and not inspect.isclass(reward) and bool(_rubric_functions(reward))


def _rubric_functions(rubric: Any) -> list[tuple[Callable[..., Any], float]]:
    """The functions of a rubric with their weights, under the names that releases of `verifiers` have had."""
    for functions, weights in (("funcs", "weights"), ("reward_funcs", "reward_weights")):
        found = getattr(rubric, functions, None)
        if isinstance(found, list | tuple) and all(map(callable, found)):
            return list(zip(found, getattr(rubric, weights, None) or [1.0] * len(found), strict=True))
    return []


async def _call_rubric(rubric: Any, args: Mapping[str, Any], reply: Reply | str, task: Task) -> Reward:
    """The weighted sum. Parts are weight × value, metrics the values as they are."""
    parts: dict[str, float] = {}
    metrics: dict[str, float] = {}
    for function, weight in _rubric_functions(rubric):
        name = getattr(function, "__name__", type(function).__name__)
        value = function(**_offered_to_rubric(rubric, parameters_of(function), reply, task))
        if inspect.isawaitable(value):
            value = await value
        metrics[name] = as_reward(value, f"the rubric's function {name!r}").total
        parts[name] = float(weight) * metrics[name]
    return Reward(sum(parts.values()), parts, metrics)


def _offered_to_rubric(rubric: Any, parameters: Parameters, reply: Reply | str, task: Task) -> dict[str, Any]:
    text = reply if isinstance(reply, str) else reply.text
    prompt, completion = list(map(dict, task.messages)), [{"role": "assistant", "content": text}]
    state = {"prompt": prompt, "completion": completion, "answer": task.answer, "task": task.taskset}
    offered: dict[str, Any] = state | {"info": dict(task.columns), "parser": getattr(rubric, "parser", None)}
    offered["state"] = state | {"info": offered["info"]}
    return (
        offered
        if parameters.takes_any
        else {key: offered[key] for key in parameters.by_name if key in offered}
    )
