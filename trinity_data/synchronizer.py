"""What explorer and trainer of a stage have to do with each other, as one object that both are handed.

Step `s` may be explored once the trainer has finished step `synced(s) - offset`, where `synced` rounds down
to the last step at which weights are taken over. Interval 1 and offset 0 are strictly on-policy. Beside this
rule, the explorer begins no step while too many rows wait, and the trainer goes on with those without waiting
for the next step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from trinity_data.config import SynchronizerConfig
from trinity_data.errors import SyncError
from trinity_data.weights import WeightFolders, Weights


class PendingLimit(Protocol):
    """Back-pressure, such as `store.backpressure.Backpressure`."""

    def excess(self, through_step: int) -> str:
        """What is too much of the rows of steps up to `through_step`; empty while there is room."""
        ...


class Synchronizer:
    """Finished steps, published weights and back-pressure of one stage.

    Either side waits here for the other; SyncError ends a wait of more than `sync_timeout` seconds.
    """

    def __init__(
        self,
        config: SynchronizerConfig,
        *,
        first_step: int = 1,
        trained: int | None = None,
        explored: int | None = None,
        limit: PendingLimit | None = None,
        folders: WeightFolders | None = None,
    ) -> None:
        """`trained` and `explored` are the last steps that earlier sessions finished.

        Without `folders` no weights are handed over.
        """
        self.config, self.first_step, self.limit, self.folders = config, first_step, limit, folders
        self.trained = first_step - 1 if trained is None else trained
        self.explored = first_step - 1 if explored is None else explored
        self.last_step: int | None = None
        """Set when no step beyond it will be explored."""
        self.published: dict[int, Weights] = {}
        """By version."""
        self._changed = asyncio.Condition()
        self._waits_since: dict[str, float] = {}

    def required_version(self, step: int) -> int:
        """The trained step without which `step` may not be explored; the weights of that step explore it."""
        interval, offset = self.config.sync_interval, self.config.sync_offset
        synced = (step - self.first_step) // interval * interval
        return max(self.first_step - 1, self.first_step - 1 + synced - offset)

    def publishes_version(self, version: int) -> bool:
        """Whether some step is explored with the weights of `version`, so that they must be published."""
        trained = version - self.first_step + 1
        due = (trained + self.config.sync_offset) % self.config.sync_interval == 0
        return self.folders is not None and (trained == 0 or (trained > 0 and due))

    def publish(self, weights: Weights) -> None:
        """Hands the weights of a version over to the explorer."""
        self.published[weights.version] = weights

    def weights_of(self, version: int) -> Weights:
        """Those that were published; of the oldest newer version where a restart could not make it again."""
        return self.published[min(number for number in self.published if number >= version)]

    def finished_loading(self, version: int) -> None:
        """The engines have the weights of `version`: older ones are removed."""
        if self.folders is not None:
            self.folders.remove(before=version)

    async def wait_to_explore(self, step: int) -> None:
        version = self.required_version(step)
        await self._wait(
            "explorer",
            lambda: self.trained >= version,
            lambda: (
                f"trainer to finish step {version}, without which step {step} is not explored; "
                f"it has finished {self.trained}"
            ),
        )

    async def wait_explored(self, step: int) -> bool:
        """False when `step` will never be explored.

        Does not wait while there are so many rows that the explorer waits.
        """
        await self._wait(
            "trainer",
            lambda: self.explored >= step or self._is_beyond_end(step) or self.excess() != "",
            lambda: f"explorer to finish step {step}; it has finished {self.explored}",
        )
        return not self._is_beyond_end(step)

    async def wait_trained(self, step: int) -> None:
        """However long it takes."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.trained >= step)

    def excess(self) -> str:
        """What is too much of the rows that explored steps have left; empty while there is room."""
        return "" if self.limit is None else self.limit.excess(self.explored)

    async def wait_for_room(self, last_step: int | None) -> bool:
        """Waits while there is too much; False when the trainer has ended meanwhile and takes no more."""

        def has_ended() -> bool:
            return last_step is not None and self.trained >= last_step

        await self._wait(
            "explorer",
            lambda: has_ended() or not self.excess(),
            lambda: f"trainer to take rows ({self.excess()}); it has finished step {self.trained}",
        )
        return not has_ended()

    async def finished_exploring(self, step: int) -> None:
        async with self._changed:
            self.explored = step
            self._waits_since.pop("trainer", None)
            self._changed.notify_all()

    async def still_exploring(self) -> None:
        """The explorer has done a part of what comes before a step: the trainer's wait begins anew."""
        async with self._changed:
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

    def _is_beyond_end(self, step: int) -> bool:
        return self.last_step is not None and step > self.last_step

    async def _wait(self, side: str, condition: Callable[[], bool], what: Callable[[], str]) -> None:
        """A wait that its caller gives up and begins again counts from its first beginning."""
        timeout = self.config.sync_timeout
        async with self._changed:
            while not condition():
                remaining = self._waits_since.setdefault(side, time.monotonic()) + timeout - time.monotonic()
                if remaining <= 0:
                    raise SyncError(
                        f"the {side} has waited {timeout:g} seconds (synchronizer.sync_timeout) for the "
                        f"{what()}; give synchronizer.sync_timeout more seconds if a step may take as long"
                    )
                try:
                    await asyncio.wait_for(self._changed.wait(), remaining)
                except TimeoutError:
                    continue
            self._waits_since.pop(side, None)
