"""One try of a task under a deadline.

Whatever happens, it ends as rows: a failure is a row that says where.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from trinity_data.dataset.task import Task
from trinity_data.errors import ConfigError, EngineError, RolloutError
from trinity_data.schema import content_id, experience_id, is_whole_in_row, message_row
from trinity_data.tokenizer import Messages, are_plain
from trinity_explorer.chat import ChatClient
from trinity_explorer.reply import Reply
from trinity_explorer.rewards.reward import Reward, as_reward
from trinity_explorer.workflows.math import MathWorkflow
from trinity_explorer.workflows.pool import PooledWorkflow
from trinity_explorer.workflows.process import ProcessLostError, WorkflowError
from trinity_explorer.workflows.workflow import Workflow
from trinity_operators import trainable

Row = dict[str, object]

MAX_ERROR = 2_000


@dataclass(frozen=True)
class Group:
    """The tries of one task in one step."""

    group_id: str
    stage: str
    step: int
    position: int
    task: Task
    epoch: int
    refill: int
    """0, or the round of refilling that asked for it."""
    repeat_times: int

    def row(self) -> Row:
        """As a row of `groups`."""
        columns = ("group_id", "stage", "step", "position", "epoch", "repeat_times")
        return {name: getattr(self, name) for name in columns} | {
            "task_id": self.task.task_id,
            "round": self.refill,
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any], task: Task) -> Group:
        columns = ("group_id", "stage", "step", "position", "epoch", "repeat_times")
        return cls(**{name: row[name] for name in columns}, task=task, refill=row["round"])


@dataclass(frozen=True)
class Limits:
    """How long a try may take, and how often it is tried again after an error."""

    timeout_seconds: float
    max_retry_times: int


def rollout_seed(seed: int, group_id: str, rollout: int, attempt: int) -> int:
    """A seed of 31 bits that is the same after a restart."""
    return int(content_id(seed, group_id, rollout, attempt)[:8], 16) & 0x7FFFFFFF


@dataclass(frozen=True)
class _Try:
    """What came of one attempt."""

    model: ChatClient
    reward: Reward | None
    error: str
    retry: bool
    more: Mapping[str, object] = field(default_factory=dict)
    """What is known of the error beyond its text."""


class _Deadline:
    """Of a try with all its retries. What the try waits for through no fault of its own does not count."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.restart()

    def restart(self) -> None:
        self.at = asyncio.get_running_loop().time() + self.seconds

    async def leave_out(self, ready: Callable[[], Any]) -> None:
        """Waits for `ready` with the clock stopped."""
        started = asyncio.get_running_loop().time()
        await ready()
        self.at += asyncio.get_running_loop().time() - started


async def run_rollout(
    group: Group,
    rollout: int,
    *,
    workflow: Workflow,
    build_model: Callable[[int], ChatClient],
    limits: Limits,
    seed: int,
    source: Row,
) -> list[Row]:
    """The rows of one try: one a reply of the model, or one that holds the error.

    `build_model` makes the model for a sampling seed; `source` holds the columns that name explorer
    and engine. EngineError is not caught: without engines there is no run.
    """
    started_at, started = datetime.now(UTC), time.perf_counter()
    deadline = _Deadline(limits.timeout_seconds)
    for attempt in range(limits.max_retry_times + 1):
        model = build_model(rollout_seed(seed, group.group_id, rollout, attempt))
        outcome = await _attempt(workflow, group.task, model, deadline)
        if not outcome.retry:
            break
    base = source | _group_columns(group, rollout, attempt)
    base |= {"started_at": started_at, "seconds": time.perf_counter() - started}
    if outcome.reward is None:
        return [base | _failure_columns(group, rollout, outcome)]
    replies = outcome.model.replies
    return [
        base
        | _reply_columns(group, rollout, turn, reply)
        | _reward_columns(outcome.reward, last=reply is replies[-1])
        for turn, reply in enumerate(replies)
    ]


async def _attempt(workflow: Workflow, task: Task, model: ChatClient, deadline: _Deadline) -> _Try:
    if not isinstance(workflow, PooledWorkflow):
        return await _under_deadline(workflow, task, model, deadline)
    await deadline.leave_out(workflow.ready)
    try:
        return await _under_deadline(workflow, task, model, deadline)
    except ProcessLostError:
        # it may have been the fault of another rollout: this one gets a process and a deadline of its own
        async with workflow.alone() as place:
            deadline.restart()
            model.replies.clear()
            return await _under_deadline(place, task, model, deadline)


# whose reward function, or whose process, has given a reward that was looked at
_CHECKED = (MathWorkflow, PooledWorkflow)


async def _under_deadline(workflow: Workflow, task: Task, model: ChatClient, deadline: _Deadline) -> _Try:
    try:
        async with asyncio.timeout_at(deadline.at) as limit:
            returned = await workflow.run(task, model)
            reward = returned if isinstance(workflow, _CHECKED) else as_reward(returned, "the workflow")
        for number, reply in enumerate(model.replies):
            _check_reply(number, reply)
    except (EngineError, ProcessLostError, ConfigError):
        raise
    except RolloutError as error:
        return _Try(model, None, str(error), retry=False)
    except WorkflowError as error:
        return _Try(model, None, str(error), retry=True, more={"traceback": error.traceback})
    except Exception as error:  # the boundary to users' workflows and rewards
        if limit.expired() and isinstance(error, TimeoutError):
            said = f"no end after {deadline.seconds:g} s; {len(model.replies)} replies came"
            return _Try(model, None, said, retry=False)
        return _Try(model, None, f"{type(error).__name__}: {error}", retry=True)
    if not model.replies:
        return _Try(model, None, "the workflow ended without asking the model", retry=False)
    return _Try(model, reward, "", retry=False)


def _check_reply(number: int, reply: Reply) -> None:
    """Raises RolloutError for a reply that no row can hold or no trainer can train."""
    tokens, logprobs = reply.completion.token_ids, reply.completion.logprobs
    if len(tokens) != len(logprobs):
        raise RolloutError(f"reply {number} has {len(tokens)} tokens and {len(logprobs)} log-probs")
    if not reply.prompt_token_ids:
        raise RolloutError(f"reply {number} has a prompt of no tokens")
    try:
        # as the column holds them: refuses what is no integer, and more than 31 bits
        array("i", tokens)
    except (TypeError, OverflowError) as error:
        raise RolloutError(f"reply {number} has a response with tokens that are no ids: {error}") from error
    if tokens and min(tokens) < 0:
        raise RolloutError(f"reply {number} has a response with the token {min(tokens)}")
    # one that is not finite makes the sum so
    if not math.isfinite(sum(logprobs)):
        found = next(logprob for logprob in logprobs if not math.isfinite(logprob))
        raise RolloutError(f"reply {number} has a log-prob of {found}; the engine cannot have sampled it")


def _group_columns(group: Group, rollout: int, attempt: int) -> Row:
    return {
        "task_id": group.task.task_id,
        "group_id": group.group_id,
        "stage": group.stage,
        "step": group.step,
        "position": group.position,
        "rollout": rollout,
        "attempt": attempt,
        "messages": group.task.messages,
        "info": "{}",
        "preference": "",
        "tools": "",
    }


def _reply_columns(group: Group, rollout: int, turn: int, reply: Reply) -> Row:
    completion, sampling = reply.completion, reply.sampling
    why = why_untrainable(reply)
    return {
        "experience_id": experience_id(group.group_id, rollout, turn),
        "turn": turn,
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        "model_version": completion.model_version,
        "version_spans": [{"start": 0, "version": completion.model_version}],
        "prompt_length": len(reply.prompt_token_ids),
        "response_length": len(completion.token_ids),
        "token_ids": reply.prompt_token_ids + completion.token_ids,
        "logprobs": completion.logprobs,
        "action_mask": [not why] * len(completion.token_ids),
        "kept_tokens": completion.kept_tokens,
        "banned_tokens": completion.banned_tokens,
        "response_text": reply.text,
        "truncated": "prompt"
        if reply.prompt_cut
        else "response"
        if completion.finish_reason == "length"
        else "",
        "error": "",
        "messages": reply.messages
        if are_plain(reply.messages)
        else [message_row(message) for message in reply.messages],
        "tools": json.dumps(reply.tools) if reply.tools else "",
        "info": _info(reply.messages, why),
    }


def why_untrainable(reply: Reply) -> str:
    """Why a row is stored and not trained; empty when it is trained."""
    if reply.prompt_cut:
        kept = len(reply.prompt_token_ids)
        return f"the prompt was longer than model.max_prompt_tokens and was cut to {kept} tokens"
    return "" if reply.completion.token_ids else "the response has no tokens"


def _info(messages: Messages, why: str) -> str:
    """Why the row is not trained, and messages of which the column `messages` cannot hold all."""
    notes: dict[str, object] = {trainable.INFO_KEY: why} if why else {}
    if not all(is_whole_in_row(message) for message in messages):
        notes["messages"] = list(messages)
    return json.dumps(notes) if notes else "{}"


def _reward_columns(reward: Reward, *, last: bool) -> Row:
    """The whole reward on every turn of the try; the metrics once."""
    return {
        "reward": reward.total,
        "reward_parts": list(reward.parts.items()),
        "metrics": list(reward.metrics.items()) if last else [],
    }


def _failure_columns(group: Group, rollout: int, outcome: _Try) -> Row:
    """Keeps what the model had said before the try failed."""
    said = [reply.text for reply in outcome.model.replies]
    return {
        "experience_id": experience_id(group.group_id, rollout),
        "turn": 0,
        "seed": outcome.model.sampling.seed,
        "token_ids": [],
        "logprobs": [],
        "action_mask": [],
        "prompt_length": 0,
        "response_length": 0,
        "response_text": "\n".join(said),
        "truncated": "",
        "error": outcome.error[:MAX_ERROR],
        "info": json.dumps({"replies": said} | dict(outcome.more)),
    }
