"""Which engine a rollout runs on, and how many run at a time on each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from trinity_explorer.chat import RequestBatcher
from trinity_explorer.engines.engine import Completion, Heard, Request
from trinity_explorer.engines.pool import EnginePool


class ChosenEngine:
    """One engine of a pool, for rollouts that stay with it."""

    def __init__(self, pool: EnginePool, number: int) -> None:
        self.pool, self.number, self.name = pool, number, pool.name

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return await self.pool.generate(requests, preferred=self.number)

    async def stream(self, request: Request, heard: Heard) -> Completion:
        return await self.pool.stream(request, heard, preferred=self.number)


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


class EngineSlot:
    """A place on one engine for a rollout, until its block ends. Shared by those of a group on this engine,
    since one for each takes a tenth of a rollout's CPU time.
    """

    def __init__(self, slots: EngineSlots, engine: int) -> None:
        self.slots, self.engine = slots, engine
        self.batcher = RequestBatcher(ChosenEngine(slots.engines, engine))

    def __enter__(self) -> RequestBatcher:
        """What the rollout asks goes through it."""
        return self.batcher

    def __exit__(self, *_: object) -> None:
        self.slots.running[self.engine] -= 1
        self.slots.free.release()


class RolloutEngines:
    """The engines of rollouts that belong together, each with the requests that go to it in one call."""

    def __init__(self, slots: EngineSlots, *, on_one_engine: bool) -> None:
        """With `on_one_engine`, the next rollout runs where the last one does, as far as there is room: those
        of a group share their prompt. Without it, each runs where the fewest do.
        """
        self.slots, self.on_one_engine = slots, on_one_engine
        self._slots: dict[int, EngineSlot] = {}
        """By the number of the engine."""
        self._last: int | None = None

    async def slot(self) -> EngineSlot:
        """Waits for one; it is taken until the block ends that is entered with it."""
        slots = self.slots
        await slots.free.acquire()
        engine = slots.choose(self._last)
        if self.on_one_engine:
            self._last = engine
        slots.running[engine] += 1
        slot = self._slots.get(engine)
        if slot is None:
            slot = self._slots[engine] = EngineSlot(slots, engine)
        return slot

    @property
    def requests(self) -> int:
        """That were answered, those of failed rollouts included."""
        return sum(slot.batcher.requests for slot in self._slots.values())

    @property
    def tokens(self) -> int:
        """Of the same: prompts and answers."""
        return sum(slot.batcher.tokens for slot in self._slots.values())
