"""Which engine a rollout runs on, and how many run at a time on each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from trinity_explorer.chat import RequestBatcher
from trinity_explorer.engines.engine import Completion, Request
from trinity_explorer.engines.pool import EnginePool


class ChosenEngine:
    """One engine of a pool, for rollouts that stay with it."""

    def __init__(self, pool: EnginePool, number: int) -> None:
        self.pool, self.number, self.name = pool, number, pool.name

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return await self.pool.generate(requests, preferred=self.number)


class EngineSlots:
    """At most `per_engine` rollouts at a time on each engine of a pool, in the order in which they ask.

    One for all that runs rollouts with the pool: steps and their refills, evaluations, probes.
    """

    def __init__(self, engines: EnginePool, per_engine: int) -> None:
        self.engines, self.per_engine = engines, per_engine
        self.running = [0] * len(engines.engines)
        """Rollouts of each engine."""
        self.free = asyncio.Semaphore(self.number)

    @property
    def number(self) -> int:
        """Rollouts at a time on all engines."""
        return self.per_engine * len(self.running)

    def choose(self, near: int | None) -> int:
        """`near` where it has room, else the engine with the fewest rollouts."""
        if near is not None and self.running[near] < self.per_engine:
            return near
        return min(range(len(self.running)), key=self.running.__getitem__)


class RolloutEngines:
    """The engines of rollouts that belong together, each with the requests that go to it in one call."""

    def __init__(self, slots: EngineSlots, *, on_one_engine: bool) -> None:
        """With `on_one_engine`, the next rollout runs where the last one does, as far as there is room: those
        of a group share their prompt. Without it, each runs where the fewest do.
        """
        self.slots, self.on_one_engine = slots, on_one_engine
        self.batchers: dict[int, RequestBatcher] = {}
        """By the number of the engine."""
        self._last: int | None = None

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[RequestBatcher]:
        """Waits for a slot; what the rollout asks goes through the batcher."""
        slots = self.slots
        async with slots.free:
            engine = slots.choose(self._last)
            self._last = engine if self.on_one_engine else None
            if engine not in self.batchers:
                self.batchers[engine] = RequestBatcher(ChosenEngine(slots.engines, engine))
            slots.running[engine] += 1
            try:
                yield self.batchers[engine]
            finally:
                slots.running[engine] -= 1

    @property
    def requests(self) -> int:
        """That were answered, those of failed rollouts included."""
        return sum(batcher.requests for batcher in self.batchers.values())

    @property
    def tokens(self) -> int:
        """Of the same: prompts and answers."""
        return sum(batcher.tokens for batcher in self.batchers.values())
