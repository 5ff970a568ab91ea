"""How far the explorer may be ahead of the trainer, as one rule.

Step `s` may be explored once the trainer has finished step `synced(s) - offset`, where `synced` rounds down
to the last step at which weights are taken over. Interval 1 and offset 0 are strictly on-policy. Beside the
rule, the explorer begins no step while too many rows wait, and the trainer goes on with those without waiting
for the next step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from trinity_data.errors import SyncError


@dataclass(frozen=True)
class SyncSchedule:
    """`sync_interval` and `sync_offset` of the pipeline file; `first_step` is the stage's first."""

    first_step: int
    interval: int
    offset: int

    def needs(self, step: int) -> int:
        """The trained step without which `step` may not be explored; the weights of that step explore it."""
        taken = (step - self.first_step) // self.interval * self.interval
        return max(self.first_step - 1, self.first_step - 1 + taken - self.offset)

    def publishes_version(self, version: int) -> bool:
        """Whether some step is explored with the weights of `version`,
        so that the trainer must publish them.
        """
        trained = version - self.first_step + 1
        return trained == 0 or (trained > 0 and (trained + self.offset) % self.interval == 0)


class Synchronizer:
    """What both sides have finished.

    Either waits here for the other, and SyncError ends a wait that takes too long.
    """

    def __init__(
        self,
        rule: SyncSchedule,
        *,
        trained: int,
        explored: int,
        excess: Callable[[int], str] = lambda through_step: "",
        timeout: float | None = None,
    ) -> None:
        """`excess` says what is too much of the rows that wait, of steps up to the one given.

        Nothing if there is room. `timeout` is how many seconds either side waits for the other
        to finish another step.
        """
        self.rule, self.timeout = rule, timeout
        self._excess = excess
        self.trained = trained
        self.explored = explored
        self.last_step: int | None = None
        """Set when no step beyond it will be explored."""
        self._changed = asyncio.Condition()
        self._waits_since: dict[str, float] = {}

    async def wait_to_explore(self, step: int) -> None:
        needed = self.rule.needs(step)
        await self._wait(
            "explorer",
            lambda: self.trained >= needed,
            lambda: (
                f"trainer to finish step {needed}, without which step {step} is not explored; "
                f"it has finished {self.trained}"
            ),
        )

    async def wait_explored(self, step: int) -> bool:
        """False when `step` will never be explored.

        Does not wait while so many rows are there that the explorer does.
        """
        await self._wait(
            "trainer",
            lambda: self.explored >= step or self.is_beyond_end(step) or self.excess() != "",
            lambda: f"explorer to finish step {step}; it has finished {self.explored}",
        )
        return not self.is_beyond_end(step)

    def excess(self) -> str:
        """What is too much of the rows that explored steps have left; nothing while there is room."""
        return self._excess(self.explored)

    async def wait_for_room(self, last_step: int | None) -> bool:
        """Waits while there is too much; False when the trainer has ended meanwhile and wants no more."""

        def ended() -> bool:
            return last_step is not None and self.trained >= last_step

        await self._wait(
            "explorer",
            lambda: ended() or not self.excess(),
            lambda: f"trainer to take rows ({self.excess()}); it has finished step {self.trained}",
        )
        return not ended()

    async def _wait(self, who: str, condition: Callable[[], bool], what: Callable[[], str]) -> None:
        """A wait that its caller gives up and begins again counts from its first beginning."""
        async with self._changed:
            while not condition():
                since = self._waits_since.setdefault(who, time.monotonic())
                left = None if self.timeout is None else since + self.timeout - time.monotonic()
                if left is not None and left <= 0:
                    raise SyncError(
                        f"the {who} has waited {self.timeout:g} seconds (synchronizer.sync_timeout) for the "
                        f"{what()}; give synchronizer.sync_timeout more seconds if a step may take as long"
                    )
                try:
                    await asyncio.wait_for(self._changed.wait(), left)
                except TimeoutError:
                    continue
            self._waits_since.pop(who, None)

    def is_beyond_end(self, step: int) -> bool:
        return self.last_step is not None and step > self.last_step

    async def finished_exploring(self, step: int) -> None:
        async with self._changed:
            self.explored = step
            self._waits_since.pop("trainer", None)
            self._changed.notify_all()

    async def finished_training(self, step: int) -> None:
        async with self._changed:
            self.trained = step
            self._waits_since.pop("explorer", None)
            self._changed.notify_all()

    async def no_more_steps(self, last_step: int) -> None:
        async with self._changed:
            self.last_step = last_step
            self._changed.notify_all()
