"""Engines and ranks that share GPUs: one side has them, the other sleeps in main memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Literal, Protocol

Side = Literal["explorer", "trainer"]


class Sleeper(Protocol):
    """What uses GPUs. Both calls may come when nothing is to be done."""

    async def sleep(self) -> None:
        """Gives their memory back."""
        ...

    async def wake(self) -> None:
        """Is as it was before it slept."""
        ...


class Turns:
    """A side keeps its turn until it ends it, and waits for the end of the other's."""

    def __init__(self, sides: Mapping[Side, Sleeper]) -> None:
        """Both sleep."""
        self.sides = sides
        self._free = asyncio.Lock()
        self._owner: Side | None = None

    async def begin(self, side: Side) -> None:
        """Does nothing in the side's own turn."""
        if self._owner != side:
            await self._free.acquire()
            self._owner = side
            await self.sides[side].wake()

    async def end(self, side: Side) -> None:
        """Does nothing outside the side's turn."""
        if self._owner == side:
            await self.sides[side].sleep()
            self._owner = None
            self._free.release()
