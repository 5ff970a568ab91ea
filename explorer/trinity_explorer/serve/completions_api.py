"""Completions of plain text as OpenAI's clients write and read them."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Literal

from trinity_data.tokenizer import ChatTemplate
from trinity_explorer.chat import Reply
from trinity_explorer.serve.api import AgentRequest, ApiError, Part
from trinity_explorer.serve.question import Question

MOST_PROMPTS = 64


class CompletionRequest(AgentRequest):
    """The body of `POST /v1/completions`."""

    kind, kind_of_event, id_prefix = "text_completion", "text_completion", "cmpl"

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: Literal[0, 1] | None = None
    """Of the tokens that were drawn; others than those are not given."""
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @property
    def comes_in_parts(self) -> bool:
        # with `echo` the answer begins with its prompt
        return self.stream and not self.echo

    def questions(self, template: ChatTemplate) -> list[Question]:
        if self.echo and self.logprobs is not None:
            text = "logprobs: those of an echoed prompt are not served; leave one of the two out"
            raise ApiError(400, text, "invalid_value", "logprobs")
        if not (prompts := self._prompts(template)) or not all(prompts) or len(prompts) > MOST_PROMPTS:
            text = f"prompt: 1 to {MOST_PROMPTS} prompts of at least one token are allowed"
            raise ApiError(400, text, "invalid_value", "prompt")
        num_tokens = len(template.tokenizer)
        if foreign := [token for prompt in prompts for token in prompt if not 0 <= token < num_tokens]:
            text = f"prompt: found the token {foreign[0]}; the model has {num_tokens}"
            raise ApiError(400, text, "invalid_value", "prompt")
        return [
            Question([{"role": "user", "content": template.decode(prompt)}], prompt_token_ids=prompt)
            for prompt in prompts
        ]

    def _prompts(self, template: ChatTemplate) -> list[list[int]]:
        match self.prompt:
            case str():
                return [template.encode_text(self.prompt)]
            case [int(), *_]:
                return [[token for token in self.prompt if isinstance(token, int)]]
            case prompts:
                return [
                    template.encode_text(each) if isinstance(each, str) else each
                    for each in prompts
                    if not isinstance(each, int)
                ]

    def choice(self, index: int, reply: Reply, name: str, template: ChatTemplate) -> dict[str, Any]:
        whole = self.part_of_choice(index, Part.whole(reply), template, first=True)
        if self.echo:
            whole["text"] = template.decode(reply.prompt_token_ids) + reply.text
        return whole | {"finish_reason": reply.completion.finish_reason}

    def part_of_choice(
        self, index: int, part: Part, template: ChatTemplate, *, first: bool
    ) -> dict[str, Any]:
        logprobs = None if self.logprobs is None else _logprobs(part, template)
        return {"index": index, "text": part.text, "logprobs": logprobs, "finish_reason": None}

    def rest_of_choice(
        self, index: int, reply: Reply, rest: Part, name: str, template: ChatTemplate, *, first: bool
    ) -> list[dict[str, Any]]:
        if first:
            return [self.choice(index, reply, name, template)]
        last = self.part_of_choice(index, rest, template, first=False)
        return [last | {"finish_reason": reply.completion.finish_reason}]


def _logprobs(part: Part, template: ChatTemplate) -> dict[str, Any]:
    """Offsets are within the part."""
    texts = [template.decode([token]) for token in part.token_ids]
    return {
        "tokens": texts,
        "token_logprobs": list(part.logprobs),
        "top_logprobs": None,
        "text_offset": [0, *accumulate(map(len, texts))][: len(texts)],
    }
