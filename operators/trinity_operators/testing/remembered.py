"""Answers of a language model that are remembered: the checks of an operator ask each question once."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from trinity_operators.base import Operator
from trinity_operators.endpoint import Answer, LanguageModel, Messages
from trinity_operators.llm_scores import LanguageModelScore


@dataclass
class Memory:
    """Shared by the operators that are built one after another."""

    answers: dict[str, Answer] = field(default_factory=dict)
    """By the question, as JSON."""
    is_started: bool = False
    num_asked: int = 0
    """Questions to the model, with the one before the first row."""
    _locks: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))

    def remembering(self, build: Callable[[], Operator]) -> Callable[[], Operator]:
        """Builds the same operators; those that ask a language model get each answer once from it."""

        def built() -> Operator:
            operator = build()
            if isinstance(operator, LanguageModelScore):
                operator.replace_model(lambda model: RememberedModel(model, self))
            return operator

        return built

    def lock(self, question: str) -> asyncio.Lock:
        """Held while the model is asked, so that equal questions at the same time are one."""
        return self._locks[question]


class RememberedModel:
    """A language model in front of which a memory stands."""

    def __init__(self, model: LanguageModel, memory: Memory) -> None:
        self.model, self.memory = model, memory

    async def start(self) -> None:
        if not self.memory.is_started:
            await self.model.start()
            self.memory.is_started = True
            self.memory.num_asked += 1

    async def ask(self, messages: Messages, *, max_tokens: int, temperature: float) -> Answer:
        question = json.dumps([[dict(message) for message in messages], max_tokens, temperature])
        async with self.memory.lock(question):
            if question not in self.memory.answers:
                self.memory.num_asked += 1
                self.memory.answers[question] = await self.model.ask(
                    messages, max_tokens=max_tokens, temperature=temperature
                )
        return self.memory.answers[question]

    async def stop(self) -> None:
        await self.model.stop()
