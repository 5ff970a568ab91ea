"""What the run and the processes of workflows say to each other: JSON with its length before it.

No pickle, because a process of a workflow may hold hostile code. Nothing it says is believed unseen.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from trinity_data.dataset.task import Task
from trinity_explorer.chat import Reply
from trinity_explorer.engines.engine import Completion, Sampling
from trinity_explorer.rewards.reward import Reward

Message = dict[str, Any]

LENGTH = struct.Struct(">I")
MAX_BYTES = 2**28

# bound here, so that a workflow that changes the json module does not change what is said
_encode = json.JSONEncoder(default=str, separators=(",", ":")).encode
_decode = json.JSONDecoder().decode


def encode(message: Mapping[str, Any]) -> bytes:
    """A message as it travels."""
    body = _encode(message).encode()
    return LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """Raises ValueError for what is no message."""
    message = _decode(body.decode())
    if not isinstance(message, dict):
        raise ValueError(f"found a {type(message).__name__} where a message should be")
    return message


def task_to_message(task: Task) -> Message:
    return vars(task) | {"messages": list(task.messages), "columns": dict(task.columns)}


def task_from_message(message: Message) -> Task:
    """A task that nobody else holds, so that what is done to it is done to nobody else."""
    return Task(**message | {"messages": tuple(message["messages"])})


def reply_to_message(reply: Reply) -> Message:
    completion = reply.completion
    return {
        "text": reply.text,
        "prompt_token_ids": reply.prompt_token_ids,
        "token_ids": completion.token_ids,
        "logprobs": completion.logprobs,
        "finish_reason": completion.finish_reason,
        "model_version": completion.model_version,
        "sampling": asdict(reply.sampling),
        "prompt_cut": reply.prompt_cut,
    }


def reply_from_message(message: Message, messages: Any, tools: Any) -> Reply:
    names = ("token_ids", "logprobs", "finish_reason", "model_version")
    completion = Completion(**{name: message[name] for name in names})
    sampling = Sampling(**message["sampling"])
    return Reply(
        message["text"],
        message["prompt_token_ids"],
        completion,
        sampling,
        message["prompt_cut"],
        messages,
        tools,
    )


def reward_to_message(reward: Reward) -> Message:
    return {"total": reward.total, "parts": dict(reward.parts), "metrics": dict(reward.metrics)}
