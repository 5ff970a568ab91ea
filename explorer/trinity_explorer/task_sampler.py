"""The order in which tasks are explored: as the stream delivers them first,
then by the seed, or the same again.
"""

from __future__ import annotations

import random
from typing import Protocol

from trinity_data.dataset.task import Task


class TaskSource(Protocol):
    """Kept tasks in their order, the stored ones first; ends where the task set ends."""

    async def next(self) -> Task | None: ...


class TaskSampler:
    """Hands out tasks over `num_epochs` passes (None: endlessly)."""

    def __init__(self, feed: TaskSource, *, num_epochs: int | None, seed: int, shuffle: bool = True) -> None:
        self.feed, self.num_epochs, self.seed, self.shuffle = feed, num_epochs, seed, shuffle
        self.epoch = 0
        self._seen: list[Task] = []
        self._order: list[Task] = []

    async def next(self) -> tuple[Task, int] | None:
        """The next task and its epoch, or None at the end."""
        if self.epoch == 0:
            task = await self.feed.next()
            if task is not None:
                self._seen.append(task)
                return task, 0
        if not self._order and not self._start_epoch():
            return None
        return self._order.pop(), self.epoch

    async def skip(self, count: int) -> None:
        """Passes over tasks that were handed out before a restart."""
        for _ in range(count):
            await self.next()

    def _start_epoch(self) -> bool:
        if not self._seen or (self.num_epochs is not None and self.epoch + 1 >= self.num_epochs):
            return False
        self.epoch += 1
        self._order = list(self._seen)
        if self.shuffle:
            random.Random(f"{self.seed}/{self.epoch}").shuffle(self._order)
        else:
            self._order.reverse()  # tasks are taken from its end
        return True
