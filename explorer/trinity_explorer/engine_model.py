"""Engines of the run as a language model for operators, with the weights that they have then."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from trinity_data.tokenizer import ChatTemplate
from trinity_explorer.chat import ChatClient, RequestBatcher
from trinity_explorer.engines.engine import Request, Sampling
from trinity_explorer.engines.pool import EnginePool
from trinity_operators.endpoint import Answer, Messages
from trinity_operators.row_answer import add_totals


class EngineModel:
    """Made in the loop of the engines; asked from another one."""

    def __init__(self, engines: EnginePool, template: ChatTemplate) -> None:
        self.engines, self.template, self.loop = engines, template, asyncio.get_running_loop()

    def chat_client(self, sampling: Sampling) -> ChatClient:
        """The model for one rollout, which is not trained on what it says."""
        sampling = replace(sampling, reports_cuts=False)
        return ChatClient(RequestBatcher(self.engines), self.template, sampling)

    async def start(self) -> None:
        """The engines run already."""

    async def stop(self) -> None:
        """The engines go on."""

    async def ask(self, messages: Messages, *, max_tokens: int, temperature: float) -> Answer:
        prompt, _ = self.template.encode(messages, ())
        sampling = Sampling(
            temperature=temperature, top_p=1.0, top_k=-1, min_tokens=0, max_tokens=max_tokens, seed=0
        )
        request = Request(prompt, sampling)
        made = asyncio.run_coroutine_threadsafe(self.engines.generate([request]), self.loop)
        (completion,) = await asyncio.wrap_future(made)
        tokens = completion.token_ids
        num_tokens = len(prompt) + len(tokens)
        add_totals(requests=1, tokens=num_tokens)
        return Answer(self.template.decode(tokens), num_tokens)
