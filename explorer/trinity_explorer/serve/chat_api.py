"""Chat completions as OpenAI's clients write and read them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trinity_data.tokenizer import ChatTemplate
from trinity_explorer.chat import Reply
from trinity_explorer.serve.api import AgentRequest, Part
from trinity_explorer.serve.question import Question

_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
"""As Qwen's and Hermes' templates write one."""


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


class ChatRequest(AgentRequest):
    """The body of `POST /v1/chat/completions`."""

    kind, kind_of_event, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    messages: list[_Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    logprobs: bool | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    top_logprobs: Literal[0] | None = None

    @property
    def asked_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def allowed_tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def comes_in_parts(self) -> bool:
        # what is a call of a tool is known when it is whole
        return self.stream and not self.allowed_tools

    def questions(self, template: ChatTemplate) -> list[Question]:
        return [Question([message.plain() for message in self.messages], self.allowed_tools)]

    def choice(self, index: int, reply: Reply, name: str, template: ChatTemplate) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": reply.text}
        reason = reply.completion.finish_reason
        if self.allowed_tools and (calls := _tool_calls(reply.text, f"call_{name}")):
            before = reply.text.partition("<tool_call>")[0].strip()
            message |= {"content": before or None, "tool_calls": calls}
            reason = "tool_calls" if reason == "stop" else reason
        logprobs = self._logprobs(Part.whole(reply), template)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def part_of_choice(
        self, index: int, part: Part, template: ChatTemplate, *, first: bool
    ) -> dict[str, Any]:
        delta = ({"role": "assistant"} if first else {}) | {"content": part.text}
        logprobs = self._logprobs(part, template)
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def rest_of_choice(
        self, index: int, reply: Reply, rest: Part, name: str, template: ChatTemplate, *, first: bool
    ) -> list[dict[str, Any]]:
        whole, choices = self.choice(index, reply, name, template), []
        if first or rest.token_ids:
            choices.append(self.part_of_choice(index, rest, template, first=first))
        if "tool_calls" in whole["message"]:
            calls = [{"index": i, **call} for i, call in enumerate(whole["message"]["tool_calls"])]
            choices[0]["delta"] = {**whole["message"], "tool_calls": calls}
        return [*choices, {"index": index, "delta": {}, "finish_reason": whole["finish_reason"]}]

    def _logprobs(self, part: Part, template: ChatTemplate) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        pairs = zip(part.token_ids, part.logprobs, strict=True)
        texts = ((template.decode([token]), logprob) for token, logprob in pairs)
        return {
            "content": [
                {"token": text, "logprob": logprob, "bytes": [*text.encode()], "top_logprobs": []}
                for text, logprob in texts
            ]
        }


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
