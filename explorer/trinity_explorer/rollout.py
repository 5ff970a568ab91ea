"""One try of a task under a deadline. Whatever happens, it ends as rows: a failure is a row that says where."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from trinity_data.errors import EngineError, RolloutError
from trinity_data.pipeline.task import Task
from trinity_data.schema import content_id, experience_id
from trinity_explorer.model import Model, Reply
from trinity_explorer.rewards.math import Reward
from trinity_explorer.workflows.workflow import Workflow

Row = dict[str, object]


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

    model: Model
    reward: Reward | None
    error: str
    retry: bool


async def run_rollout(
    group: Group,
    rollout: int,
    *,
    workflow: Workflow,
    build_model: Callable[[int], Model],
    limits: Limits,
    seed: int,
    source: Row,
) -> list[Row]:
    """The rows of one try: one a reply of the model, or one that holds the error.

    `build_model` makes the model for a sampling seed; `source` holds the columns that name explorer and engine.
    EngineError is not caught: without engines there is no run.
    """
    started_at, started = datetime.now(UTC), time.perf_counter()
    deadline = asyncio.get_running_loop().time() + limits.timeout_seconds
    for attempt in range(limits.max_retry_times + 1):
        model = build_model(rollout_seed(seed, group.group_id, rollout, attempt))
        outcome = await _attempt(workflow, group.task, model, deadline, limits.timeout_seconds)
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


async def _attempt(
    workflow: Workflow, task: Task, model: Model, deadline: float, timeout_seconds: float
) -> _Try:
    try:
        async with asyncio.timeout_at(deadline) as limit:
            reward = await workflow.run(task, model)
    except EngineError:
        raise
    except RolloutError as error:
        return _Try(model, None, str(error), retry=False)
    except Exception as error:  # the boundary to users' workflows and rewards
        if limit.expired() and isinstance(error, TimeoutError):
            said = f"no end after {timeout_seconds:g} s; {len(model.replies)} replies came"
            return _Try(model, None, said, retry=False)
        return _Try(model, None, f"{type(error).__name__}: {error}", retry=True)
    if not model.replies:
        return _Try(model, None, "the workflow ended without asking the model", retry=False)
    return _Try(model, reward, "", retry=False)


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
        "action_mask": [True] * len(completion.token_ids),
        "kept_tokens": completion.kept_tokens,
        "banned_tokens": completion.banned_tokens,
        "response_text": reply.text,
        "truncated": "prompt"
        if reply.prompt_cut
        else "response"
        if completion.finish_reason == "length"
        else "",
        "error": "",
    }


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
        "error": outcome.error,
        "info": json.dumps({"replies": said}),
    }
