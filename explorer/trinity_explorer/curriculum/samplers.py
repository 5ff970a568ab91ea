"""Hands a step its tasks: from one task set as it is read, from a whole one by a selector, or from several.

After a restart a sampler is shown the groups on record and goes on behind them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from trinity_data.dataset.task import Task
from trinity_explorer.curriculum.pool import Floats, Places, TaskPool
from trinity_explorer.curriculum.selectors import Request, Selector


class Taken(NamedTuple):
    """A task that a step gets."""

    task: Task
    epoch: int
    """How often its set was gone through before."""
    repeat_times: int | None = None
    """Rollouts of its group, where the task set does not say it."""


class Tried(NamedTuple):
    """A group on record."""

    step: int
    taskset: str
    task_id: str


class Sampler(Protocol):
    async def resume(self, tried: Sequence[Tried]) -> None:
        """Goes on behind groups on record, which are in the order in which their tasks were taken."""

    async def take(self, count: int, *, step: int, refill: int) -> list[Taken]:
        """Tasks for a step; fewer at the end."""
        ...

    def give_back(self, taken: Sequence[Taken]) -> None:
        """What `take` has returned last is not taken."""
        ...

    def go_on_behind(self, num_taken: Mapping[str, int]) -> None:
        """Goes on behind so many tasks of each set, which may have been taken by others."""
        ...


class TaskSource(Protocol):
    """Kept tasks in their order, the stored ones first; ends where the task set ends."""

    async def next(self) -> Task | None: ...


class StreamSampler:
    """Tasks over `num_epochs` passes (None: endlessly).

    First as the source delivers them, then by the seed, or the same again.
    """

    def __init__(
        self, source: TaskSource, *, num_epochs: int | None, seed: int, shuffle: bool = True
    ) -> None:
        self.source, self.num_epochs, self.seed, self.shuffle = source, num_epochs, seed, shuffle
        self.num_taken = 0
        self._seen: list[Task] = []
        self._has_ended = False
        self._epoch, self._order = 0, self._seen
        """The last epoch that was asked for, and its tasks."""

    async def resume(self, tried: Sequence[Tried]) -> None:
        self.num_taken = len(tried)

    async def take(self, count: int, *, step: int, refill: int) -> list[Taken]:
        taken = list[Taken]()
        while len(taken) < count and (each := await self._task(self.num_taken)) is not None:
            taken.append(each)
            self.num_taken += 1
        return taken

    def give_back(self, taken: Sequence[Taken]) -> None:
        self.num_taken -= len(taken)

    def go_on_behind(self, num_taken: Mapping[str, int]) -> None:
        (self.num_taken,) = num_taken.values()

    async def _task(self, number: int) -> Taken | None:
        """The task of this number, from 0 on and through all epochs; None behind the last."""
        while not self._has_ended and len(self._seen) <= number:
            task = await self.source.next()
            if task is None:
                self._has_ended = True
            else:
                self._seen.append(task)
        if number < len(self._seen):
            return Taken(self._seen[number], 0)
        if not self._seen:
            return None
        epoch, place = divmod(number, len(self._seen))
        if self.num_epochs is not None and epoch >= self.num_epochs:
            return None
        return Taken(self._of_epoch(epoch)[place], epoch)

    def _of_epoch(self, epoch: int) -> Sequence[Task]:
        """The tasks of an epoch after the first, in its order."""
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(self._seen)
            if self.shuffle:
                random.Random(f"{self.seed}/{epoch}").shuffle(self._order)
                self._order.reverse()
        return self._order


class PoolSampler:
    """Tasks that a selector chooses from a whole set; of `num_epochs` times its size (None: endlessly)."""

    def __init__(
        self,
        load: Callable[[], Awaitable[TaskPool]],
        build: Callable[[TaskPool], Selector],
        *,
        num_epochs: int | None,
    ) -> None:
        """`load` waits until the set is read; it is called once, before the first task is taken."""
        self.load, self.build, self.num_epochs = load, build, num_epochs
        self.num_taken, self._step = 0, -1
        self._chosen: list[str] = []
        self._loaded: tuple[TaskPool, Selector] | None = None

    async def resume(self, tried: Sequence[Tried]) -> None:
        self.num_taken = len(tried)
        if tried:
            self._step = tried[-1].step
            self._chosen = [each.task_id for each in tried if each.step == self._step]

    async def take(self, count: int, *, step: int, refill: int) -> list[Taken]:
        if self._loaded is None:
            pool = await self.load()
            self._loaded = pool, self.build(pool)
        pool, selector = self._loaded
        if self.num_epochs is not None:
            count = min(count, self.num_epochs * len(pool) - self.num_taken)
        if count <= 0 or not len(pool):
            return []
        if step != self._step:
            self._step, self._chosen = step, []
        chosen = pool.places(pa.array(self._chosen, pa.string()))
        request = Request(step, count, refill=refill, num_taken=self.num_taken, chosen=chosen)
        tasks = pool.tasks(await asyncio.to_thread(selector.choose, request))
        self._chosen += [task.task_id for task in tasks]
        first, self.num_taken = self.num_taken, self.num_taken + len(tasks)
        return [Taken(task, number // len(pool)) for number, task in enumerate(tasks, first)]

    def give_back(self, taken: Sequence[Taken]) -> None:
        self.num_taken -= len(taken)
        self._chosen = self._chosen[: len(self._chosen) - len(taken)]

    def go_on_behind(self, num_taken: Mapping[str, int]) -> None:
        (self.num_taken,) = num_taken.values()


class TaskMixer:
    """Tasks of several sets, drawn by weight or in turn; of one set, its own.

    Which set a task is of follows from the seed, the step and the number of tasks before it. A set that has
    ended leaves its share to the others.
    """

    def __init__(
        self,
        samplers: Mapping[str, Sampler],
        *,
        weights: Sequence[float],
        mix: Literal["weighted", "in_turn"],
        seed: int,
    ) -> None:
        """`samplers` and `weights` are of the sets in their order, the former by name."""
        self.samplers, self.mix, self.seed = dict(samplers), mix, seed
        self.weights = np.array(weights, np.float64)
        self.num_taken = 0

    async def resume(self, tried: Sequence[Tried]) -> None:
        self.num_taken = len(tried)
        for name, sampler in self.samplers.items():
            await sampler.resume([each for each in tried if each.taskset == name])

    async def take(self, count: int, *, step: int, refill: int) -> list[Taken]:
        taken, names = list[Taken](), list(self.samplers)
        weights, random = self.weights.copy(), np.random.default_rng([self.seed, step, refill])
        while len(taken) < count and weights.any():
            order = self._deal(count - len(taken), weights, random).tolist()
            found = dict[int, list[Taken]]()
            for number in sorted(set(order)):
                wanted = order.count(number)
                found[number] = await self.samplers[names[number]].take(wanted, step=step, refill=refill)
                weights[number] *= len(found[number]) == wanted
            for number in order:
                if found[number]:
                    taken.append(found[number].pop(0))
                    self.num_taken += 1
        return taken

    def give_back(self, taken: Sequence[Taken]) -> None:
        self.num_taken -= len(taken)
        for name, sampler in self.samplers.items():
            sampler.give_back([each for each in taken if each.task.taskset == name])

    def go_on_behind(self, num_taken: Mapping[str, int]) -> None:
        of_sets = {name: num_taken.get(name, 0) for name in self.samplers}
        self.num_taken = sum(of_sets.values())
        for name, sampler in self.samplers.items():
            sampler.go_on_behind({name: of_sets[name]})

    def _deal(self, count: int, weights: Floats, random: np.random.Generator) -> Places:
        """The numbers of the sets that the next `count` tasks are of."""
        open_sets = np.flatnonzero(weights)
        if self.mix == "in_turn":
            return open_sets[(self.num_taken + np.arange(count)) % len(open_sets)]
        return random.choice(len(weights), size=count, p=weights / weights.sum())
