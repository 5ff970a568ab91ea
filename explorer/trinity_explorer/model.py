"""What a workflow talks to: chat in, text and tokens out.

Requests that a group makes in the same turn of the event loop go to the engine in one call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from trinity_data.errors import RolloutError
from trinity_explorer.engines.engine import Completion, Request, Sampling
from trinity_explorer.engines.pool import EnginePool

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Reply:
    """One answer of the policy, with the prompt it was given."""

    text: str
    prompt_token_ids: list[int]
    completion: Completion
    sampling: Sampling
    prompt_cut: bool = False
    """Whether the prompt lost its beginning because it was too long."""


class ChatTemplate:
    """Messages to token ids and back, with the tokenizer's own template or one from the pipeline file."""

    def __init__(
        self, tokenizer: Any, template: str | None, *, max_prompt_tokens: int | None, truncate: bool
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.max_prompt_tokens = max_prompt_tokens
        self.truncate = truncate
        self._encode = lru_cache(maxsize=4096)(self._encode_uncached)
        # what a Hugging Face tokenizer does around the fast one below it takes most of the time
        fast = getattr(tokenizer, "backend_tokenizer", None)
        self._fast = None if getattr(tokenizer, "clean_up_tokenization_spaces", True) else fast

    def encode(self, messages: Messages) -> list[int]:
        """Token ids up to where the answer begins. Raises RolloutError for a prompt that is too long."""
        token_ids, most = self._whole(messages), self.max_prompt_tokens
        if most is None or len(token_ids) <= most:
            return token_ids
        if self.truncate:
            return token_ids[-most:]
        raise RolloutError(f"the prompt has {len(token_ids)} tokens, model.max_prompt_tokens is {most}")

    def cuts(self, messages: Messages) -> bool:
        """Whether `encode` takes away the beginning of the prompt."""
        most = self.max_prompt_tokens
        return self.truncate and most is not None and len(self._whole(messages)) > most

    def _whole(self, messages: Messages) -> list[int]:
        return self._encode(tuple((m["role"], m["content"]) for m in messages))

    def _encode_uncached(self, messages: tuple[tuple[str, str], ...]) -> list[int]:
        chat = [{"role": role, "content": content} for role, content in messages]
        text = self.tokenizer.apply_chat_template(
            chat, chat_template=self.template, tokenize=False, add_generation_prompt=True
        )
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        decoder = self.tokenizer if self._fast is None else self._fast
        return str(decoder.decode(token_ids, skip_special_tokens=True))


MAX_REQUESTS_PER_CALL = 64


class GroupBatcher:
    """Collects requests for one turn of the event loop, then sends them to the engines in as few calls as can be.

    One a group: its requests travel together and no other group waits for them.
    """

    def __init__(self, engines: EnginePool) -> None:
        self.engines = engines
        self._waiting: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def generate(self, request: Request) -> Completion:
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._send)
        future: asyncio.Future[Completion] = loop.create_future()
        self._waiting.append((request, future))
        return await future

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        for start in range(0, len(waiting), MAX_REQUESTS_PER_CALL):
            call = asyncio.get_running_loop().create_task(
                self._call(waiting[start : start + MAX_REQUESTS_PER_CALL])
            )
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _call(self, waiting: list[tuple[Request, asyncio.Future[Completion]]]) -> None:
        try:
            completions = await self.engines.generate([request for request, _ in waiting])
        except Exception as error:  # the boundary to engines: every waiting rollout hears of it
            for _, future in waiting:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), completion in zip(waiting, completions, strict=True):
            if not future.done():
                future.set_result(completion)


class Model:
    """The policy, for one rollout. Remembers the replies it gave, so that a workflow need not collect them."""

    def __init__(self, batcher: GroupBatcher, template: ChatTemplate, sampling: Sampling) -> None:
        self.batcher, self.template, self.sampling = batcher, template, sampling
        self.replies: list[Reply] = []

    async def chat(self, messages: Messages, **changes: Any) -> Reply:
        """The policy's next message. `changes` replace fields of the rollout's sampling, such as `max_tokens`."""
        sampling = replace(self.sampling, **changes) if changes else self.sampling
        prompt = self.template.encode(messages)
        completion = await self.batcher.generate(Request(prompt, sampling))
        text, cut = self.template.decode(completion.token_ids), self.template.cuts(messages)
        reply = Reply(text, prompt, completion, sampling, cut)
        self.replies.append(reply)
        return reply
