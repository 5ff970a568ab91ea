"""How far the explorer may be ahead of the trainer, as one rule.

Step `s` may be explored once the trainer has finished step `synced(s) - offset`, where `synced` rounds down to the
last step at which weights are taken over. Interval 1 and offset 0 are strictly on-policy. Beside the rule, the explorer
begins no step while too many rows wait, and the trainer goes on with those without waiting for the next step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class PaceRule:
    """`sync_interval` and `sync_offset` of the pipeline file; `first_step` is the stage's first."""

    first_step: int
    interval: int
    offset: int

    def needs(self, step: int) -> int:
        """The trained step without which `step` may not be explored; the weights of that step explore it."""
        taken = (step - self.first_step) // self.interval * self.interval
        return max(self.first_step - 1, self.first_step - 1 + taken - self.offset)

    def hands_over(self, version: int) -> bool:
        """Whether some step is explored with the weights of `version`, so that the trainer must publish them."""
        trained = version - self.first_step + 1
        return trained == 0 or (trained > 0 and (trained + self.offset) % self.interval == 0)


class Pace:
    """What both sides have finished. Either waits here for the other."""

    def __init__(
        self,
        rule: PaceRule,
        *,
        trained: int,
        explored: int,
        excess: Callable[[int], str] = lambda through_step: "",
    ) -> None:
        """`excess` says what is too much of the rows that wait, of steps up to the one given; nothing if there is room."""
        self.rule = rule
        self._excess = excess
        self.trained = trained
        self.explored = explored
        self.last_step: int | None = None
        """Set when no step beyond it will be explored."""
        self._changed = asyncio.Condition()

    async def may_explore(self, step: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.trained >= self.rule.needs(step))

    async def wait_explored(self, step: int) -> bool:
        """False when `step` will never be explored. Does not wait while so many rows are there that the explorer does."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self.explored >= step or self.is_beyond_end(step) or self.excess() != ""
            )
        return not self.is_beyond_end(step)

    def excess(self) -> str:
        """What is too much of the rows that explored steps have left; nothing while there is room."""
        return self._excess(self.explored)

    async def wait_for_room(self, last_step: int | None) -> bool:
        """Waits while there is too much; False when the trainer has ended meanwhile and wants no more."""

        def ended() -> bool:
            return last_step is not None and self.trained >= last_step

        async with self._changed:
            await self._changed.wait_for(lambda: ended() or not self.excess())
        return not ended()

    def is_beyond_end(self, step: int) -> bool:
        return self.last_step is not None and step > self.last_step

    async def finished_exploring(self, step: int) -> None:
        async with self._changed:
            self.explored = step
            self._changed.notify_all()

    async def finished_training(self, step: int) -> None:
        async with self._changed:
            self.trained = step
            self._changed.notify_all()

    async def no_more_steps(self, last_step: int) -> None:
        async with self._changed:
            self.last_step = last_step
            self._changed.notify_all()
