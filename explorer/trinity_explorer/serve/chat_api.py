"""Chat completions as OpenAI's clients write and read them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trinity_data.tokenizer import ChatTemplate
from trinity_explorer.chat import Reply

MOST_CHOICES = 64
_UNION_PART = re.compile(r"^str$|\[")
"""In the place of an error: which type of several it is about."""
_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
"""As Qwen's and Hermes' templates write one."""


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


class _TextPart(BaseModel):
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[_TextPart] | None = None
    tool_calls: list[dict[str, Any]] | None = None

    def plain(self) -> dict[str, Any]:
        """As chat templates take it: texts in one piece, the arguments of tool calls as objects."""
        message = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            message["content"] = "".join(part.text for part in self.content)
        message.setdefault("content", "")
        if self.tool_calls is not None:
            message["tool_calls"] = [_with_arguments(call) for call in self.tool_calls]
        return message


class _StreamOptions(BaseModel):
    include_usage: bool = False


class ChatRequest(BaseModel):
    """The body of `POST /v1/chat/completions`. How tokens are drawn is up to the pipeline file: temperature,
    top_p and top_k of a request are ignored.
    """

    model: str
    messages: list[_Message] = Field(min_length=1)
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    stop: str | list[str] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    logprobs: bool | None = None
    # what would be another answer than the one that comes is refused
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    logit_bias: dict[str, Literal[0]] | None = None
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    top_logprobs: Literal[0] | None = None

    @property
    def stops(self) -> list[str]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]

    @property
    def plain_messages(self) -> list[dict[str, Any]]:
        return [message.plain() for message in self.messages]

    @property
    def allowed_tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else self.tools or []

    def changes(self, most_tokens: int) -> dict[str, Any]:
        """Of the sampling: no more than `most_tokens`, however many were asked for."""
        asked = self.max_completion_tokens or self.max_tokens
        own = {} if asked is None else {"max_tokens": min(asked, most_tokens)}
        return own if self.seed is None else {**own, "seed": self.seed & 0x7FFFFFFF}


def read_body(kind: type[BaseModel], text: bytes) -> Any:
    """The body of a request. Raises ApiError for what it cannot be."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        # of a value that may be one of several types the error that looked deepest into it
        first = max(error.errors(), key=lambda each: len(each["loc"]))
        param = ".".join(str(part) for part in first["loc"] if not _UNION_PART.search(str(part))) or None
        found = "" if first["type"] in ("missing", "json_invalid") else f"; found {first['input']!r:.80}"
        raise ApiError(400, f"{param or 'body'}: {first['msg']}{found}", "invalid_value", param) from error


def completion_body(
    request: ChatRequest, session_id: str, turn: int, replies: Sequence[Reply], template: ChatTemplate
) -> dict[str, Any]:
    """The answer to a request, as one object."""
    choices = [_choice(request, session_id, turn, i, reply, template) for i, reply in enumerate(replies)]
    return _head(request, session_id, turn, replies[0], "chat.completion") | {
        "choices": choices,
        "usage": _usage(replies),
    }


def completion_chunks(
    request: ChatRequest, session_id: str, turn: int, replies: Sequence[Reply], template: ChatTemplate
) -> Iterator[dict[str, Any]]:
    """The same as the events of a stream: each choice whole, and how it ended."""
    head = _head(request, session_id, turn, replies[0], "chat.completion.chunk")
    for i, reply in enumerate(replies):
        whole = _choice(request, session_id, turn, i, reply, template)
        calls = whole["message"].get("tool_calls", ())
        delta = whole["message"] | (
            {"tool_calls": [{"index": number, **call} for number, call in enumerate(calls)]} if calls else {}
        )
        begins = {"index": i, "delta": delta, "logprobs": whole["logprobs"], "finish_reason": None}
        yield head | {"choices": [begins]}
        yield head | {"choices": [{"index": i, "delta": {}, "finish_reason": whole["finish_reason"]}]}
    if request.stream_options is not None and request.stream_options.include_usage:
        yield head | {"choices": [], "usage": _usage(replies)}


def _head(request: ChatRequest, session_id: str, turn: int, reply: Reply, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{session_id}-{turn}",
        "object": kind,
        "created": int(time.time()),
        "model": request.model,
        "system_fingerprint": f"version-{reply.completion.model_version}",
        "session_id": session_id,
    }


def _choice(
    request: ChatRequest, session_id: str, turn: int, index: int, reply: Reply, template: ChatTemplate
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    reason = reply.completion.finish_reason
    if request.allowed_tools and (calls := _tool_calls(reply.text, f"call_{session_id}_{turn + index}")):
        before = reply.text.partition("<tool_call>")[0].strip()
        message |= {"content": before or None, "tool_calls": calls}
        reason = "tool_calls" if reason == "stop" else reason
    logprobs = _logprobs(reply, template) if request.logprobs else None
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}


def _tool_calls(text: str, name: str) -> list[dict[str, Any]]:
    """Those that the text makes, without those that cannot be read."""
    calls = []
    for number, found in enumerate(_TOOL_CALL.findall(text)):
        try:
            call = json.loads(found)
            function = {"name": call["name"], "arguments": json.dumps(call.get("arguments", {}))}
        except (ValueError, KeyError):
            continue
        calls.append({"id": f"{name}_{number}", "type": "function", "function": function})
    return calls


def _with_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}


def _logprobs(reply: Reply, template: ChatTemplate) -> dict[str, Any]:
    completion = reply.completion
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    texts = ((template.decode([token]), logprob) for token, logprob in pairs)
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": [*text.encode()], "top_logprobs": []}
            for text, logprob in texts
        ]
    }


def _usage(replies: Sequence[Reply]) -> dict[str, int]:
    prompt = len(replies[0].prompt_token_ids)
    completion = sum(len(reply.completion.token_ids) for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
