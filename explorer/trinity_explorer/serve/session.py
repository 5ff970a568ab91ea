"""A session: one rollout of an agent outside, from its first request to its reward; and how the ledger has
it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from trinity_data.dataset.task import Task
from trinity_data.tokenizer import ChatTemplate
from trinity_explorer.chat import Reply
from trinity_explorer.engines.engine import Completion, Sampling, spans_of
from trinity_explorer.rewards.reward import Reward


@dataclass(frozen=True)
class End:
    """What became of a session."""

    reward: Reward | None
    error: str = ""
    """Why there is no reward."""
    at: datetime = field(default_factory=lambda: datetime.now(UTC), compare=False)

    def dump(self) -> dict[str, Any]:
        """As plain values."""
        reward = None if self.reward is None else vars(self.reward)
        return {"reward": reward, "error": self.error, "at": self.at.isoformat()}

    @classmethod
    def load(cls, value: Mapping[str, Any]) -> End:
        reward = None if value["reward"] is None else Reward(**value["reward"])
        return cls(reward, value["error"], datetime.fromisoformat(value["at"]))


@dataclass
class Session:
    """Agents give it its id."""

    session_id: str
    task: Task
    epoch: int
    """Which group of its task it is in."""
    rollout: int
    """Its number in the group."""
    opened_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    replies: list[Reply] = field(default_factory=list)
    end: End | None = None
    """None while it is open."""
    num_running: int = 0
    """Requests that are under way."""
    used_at: float = field(default_factory=time.monotonic)
    """When the last request or the reward came."""
    ending: asyncio.Lock = field(default_factory=asyncio.Lock)

    def dump(self) -> dict[str, Any]:
        """Without its replies."""
        return {
            "task_id": self.task.task_id,
            "epoch": self.epoch,
            "rollout": self.rollout,
            "opened_at": self.opened_at.isoformat(),
            "end": None if self.end is None else self.end.dump(),
        }

    @classmethod
    def load(cls, session_id: str, value: Mapping[str, Any], task: Task, replies: Sequence[Reply]) -> Session:
        return cls(
            session_id,
            task,
            value["epoch"],
            value["rollout"],
            datetime.fromisoformat(value["opened_at"]),
            list(replies),
            None if value["end"] is None else End.load(value["end"]),
        )


@dataclass
class SessionGroup:
    """Sessions of one task that are compared with each other."""

    task: Task
    epoch: int
    size: int
    """Sessions that it is to have."""
    sessions: list[Session] = field(default_factory=list)
    """By their number."""
    step: int | None = None
    """That it was handed out to."""

    @property
    def is_over(self) -> bool:
        """Whether none of its sessions is open."""
        return all(session.end is not None for session in self.sessions)

    @property
    def is_full(self) -> bool:
        return len(self.sessions) >= self.size

    @property
    def has_reward(self) -> bool:
        return any(session.end is not None and session.end.reward is not None for session in self.sessions)


def dump_reply(reply: Reply) -> dict[str, Any]:
    """As plain values: floats keep all their digits."""
    plain = {"messages": [dict(message) for message in reply.messages], "tools": [*map(dict, reply.tools)]}
    parts = {"completion": reply.completion._asdict(), "sampling": vars(reply.sampling)}
    return {**reply._asdict(), **plain, **parts}


def load_reply(value: Mapping[str, Any]) -> Reply:
    completion, sampling = Completion(**value["completion"]), Sampling(**value["sampling"])
    if completion.version_spans is not None:
        spans = [(first, version) for first, version in completion.version_spans]
        completion = completion._replace(version_spans=spans)
    return Reply(**{**value, "completion": completion, "sampling": sampling})


def cut_at(reply: Reply, stops: Sequence[str], template: ChatTemplate) -> Reply:
    """The reply up to the first token with which one of `stops` is in its text, as if generating had ended
    there.
    """

    if not any(stop in reply.text for stop in stops):
        return reply
    tokens = reply.completion.token_ids
    low = num_up_to_stop(tokens, stops, template)
    completion = reply.completion
    cuts = (completion.kept_tokens, completion.banned_tokens)
    kept, banned = (None if cut is None else cut[:low] for cut in cuts)
    spans = completion.version_spans
    completion = completion._replace(
        token_ids=tokens[:low],
        logprobs=completion.logprobs[:low],
        finish_reason="stop",
        kept_tokens=kept,
        banned_tokens=banned,
        version_spans=None if spans is None else spans_of(spans, low),
    )
    return reply._replace(completion=completion, text=template.decode(tokens[:low]))


def num_up_to_stop(tokens: Sequence[int], stops: Sequence[str], template: ChatTemplate) -> int:
    """How many tokens there are up to the first with which one of `stops` is in their text, as it is in that
    of all.
    """
    low, high = 1, len(tokens)
    while low < high:
        middle = (low + high) // 2
        text = template.decode(tokens[:middle])
        low, high = (low, middle) if any(stop in text for stop in stops) else (middle + 1, high)
    return low
