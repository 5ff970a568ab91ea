"""What all requests of agents have in common: OpenAI's errors, sampling and counts."""

from __future__ import annotations

import re
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from trinity_data.tokenizer import ChatTemplate
from trinity_explorer.chat import Reply
from trinity_explorer.serve.question import Question

MOST_CHOICES = 64
_UNION_PART = re.compile(r"^str$|^list|\[|^function-|^literal")
"""In the place of an error: which type of several it is about."""
_Body = TypeVar("_Body", bound=BaseModel)


@dataclass
class ApiError(Exception):
    """An answer in OpenAI's shape in place of what was asked for."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Part:
    """Of an answer: its next tokens, and the text that they add."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]

    @classmethod
    def whole(cls, reply: Reply) -> Part:
        return cls(reply.text, reply.completion.token_ids, reply.completion.logprobs)


class _StreamOptions(BaseModel):
    include_usage: bool = False


class AgentRequest(BaseModel):
    """What is asked of the model. How tokens are drawn is up to the pipeline file: temperature, top_p and
    top_k of a request are ignored.
    """

    kind: ClassVar[str]
    """`object` of the answer."""
    kind_of_event: ClassVar[str]
    id_prefix: ClassVar[str]

    model: str
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    stop: str | list[str] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    # what would be another answer than the one that comes is refused
    logit_bias: dict[str, Literal[0]] | None = None
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None

    @property
    def stops(self) -> list[str]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def comes_in_parts(self) -> bool:
        """Whether the text can be sent before the answer is whole."""
        return self.stream

    def changes(self, most_tokens: int) -> dict[str, Any]:
        """Of the sampling: no more than `most_tokens`, however many were asked for."""
        asked = self.asked_tokens
        own = {} if asked is None else {"max_tokens": min(asked, most_tokens)}
        return own if self.seed is None else {**own, "seed": self.seed & 0x7FFFFFFF}

    @abstractmethod
    def questions(self, template: ChatTemplate) -> list[Question]:
        """Each of which gets `n` answers. Raises RolloutError for what cannot be asked."""

    @abstractmethod
    def choice(self, index: int, reply: Reply, name: str, template: ChatTemplate) -> dict[str, Any]:
        """A whole answer; `name` is for what it has to name."""

    @abstractmethod
    def part_of_choice(
        self, index: int, part: Part, template: ChatTemplate, *, first: bool
    ) -> dict[str, Any]:
        """The same of an answer that goes on."""

    @abstractmethod
    def rest_of_choice(
        self, index: int, reply: Reply, rest: Part, name: str, template: ChatTemplate, *, first: bool
    ) -> list[dict[str, Any]]:
        """What is left of an answer when it is whole, and then how it ended."""

    def body(
        self, session_id: str, turn: int, replies: Sequence[Reply], template: ChatTemplate
    ) -> dict[str, Any]:
        """The answer as one object."""
        choices = [
            self.choice(i, reply, f"{session_id}_{turn + i}", template) for i, reply in enumerate(replies)
        ]
        return self.head(self.kind, f"{session_id}-{turn}", session_id, replies[0]) | {
            "choices": choices,
            "usage": self.usage(replies),
        }

    def head(self, kind: str, name: str, session_id: str, reply: Reply | None = None) -> dict[str, Any]:
        """`reply` names the version that made it."""
        version = None if reply is None else f"version-{reply.completion.model_version}"
        return {
            "id": f"{self.id_prefix}-{name}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": version,
            "session_id": session_id,
        }

    def usage(self, replies: Sequence[Reply]) -> dict[str, int]:
        """A prompt counts once, however many answers it has."""
        prompt = sum(len(reply.prompt_token_ids) for reply in replies[:: self.n])
        completion = sum(len(reply.completion.token_ids) for reply in replies)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }


def read_body(kind: type[_Body], text: bytes) -> _Body:
    """The body of a request. Raises ApiError for what it cannot be."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        # of a value that may be one of several types the error that looked deepest into it
        first = max(error.errors(), key=lambda each: len(each["loc"]))
        param = ".".join(str(part) for part in first["loc"] if not _UNION_PART.search(str(part))) or None
        found = "" if first["type"] in ("missing", "json_invalid") else f"; found {first['input']!r:.80}"
        raise ApiError(400, f"{param or 'body'}: {first['msg']}{found}", "invalid_value", param) from error
