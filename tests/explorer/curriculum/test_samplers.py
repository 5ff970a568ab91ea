"""Samplers hand out tasks in an order that goes on after a restart, whatever the set and the mix."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Literal

import numpy as np
import pytest

from trinity_data.dataset.task import Task
from trinity_data.schema import rows_to_table
from trinity_explorer.curriculum.pool import TaskPool
from trinity_explorer.curriculum.samplers import PoolSampler, Sampler, StreamSampler, TaskMixer, Tried
from trinity_explorer.curriculum.selectors import EasyToHardSelector, RandomSelector


class Tasks:
    """A source of tasks 0, 1, …"""

    def __init__(self, count: int, *, taskset: str = "sums") -> None:
        self.left = [Task(f"{i}", taskset, "", (), "", "", "") for i in range(count)][::-1]

    async def next(self) -> Task | None:
        return self.left.pop() if self.left else None


def pool(count: int, *, taskset: str = "sums") -> TaskPool:
    rows: list[dict[str, object]] = [
        {"task_id": f"{i}", "taskset": taskset, "prompt": f"{i}", "messages": [], "answer": "",
         "workflow": "", "reward_fn": "", "columns": "{}", "scores": [("easy", float(-i))], "kept": True,
         "position": i}
        for i in range(count)
    ]  # fmt: skip
    return TaskPool.from_rows(rows_to_table("tasks", rows), feature_keys=["easy"])


def stream(num_epochs: int | None, *, seed: int = 0, shuffle: bool = True) -> StreamSampler:
    return StreamSampler(Tasks(5), num_epochs=num_epochs, seed=seed, shuffle=shuffle)


def easy_to_hard(num_epochs: int | None = None, *, count: int = 5, taskset: str = "sums") -> PoolSampler:
    async def load() -> TaskPool:
        return pool(count, taskset=taskset)

    return PoolSampler(load, lambda of: EasyToHardSelector(of.features), num_epochs=num_epochs)


def random_tasks(count: int = 20) -> PoolSampler:
    async def load() -> TaskPool:
        return pool(count)

    return PoolSampler(load, lambda of: RandomSelector(len(of), seed=1), num_epochs=None)


Mix = Literal["weighted", "in_turn"]


def mixed(mix: Mix = "weighted", *, counts: tuple[int, int] = (6, 9)) -> TaskMixer:
    """One set as it is read for two epochs, and one from easy to hard for one."""
    first = StreamSampler(Tasks(counts[0], taskset="a"), num_epochs=2, seed=0)
    second = easy_to_hard(1, count=counts[1], taskset="b")
    return TaskMixer({"a": first, "b": second}, weights=[1.0, 3.0], mix=mix, seed=4)


Step = list[tuple[str, str, int]]


def steps_of(
    sampler: Sampler, *, first: int = 1, last: int, size: int, refills: int = 0, tried: Sequence[Tried] = ()
) -> list[Step]:
    """Set, id and epoch of the tasks of each step, with two more for each refill."""

    async def go() -> list[Step]:
        await sampler.resume(tried)
        steps = []
        for step in range(first, last + 1):
            taken = await sampler.take(size, step=step, refill=0)
            for refill in range(1, refills + 1):
                taken += await sampler.take(2, step=step, refill=refill)
            steps.append([(task.taskset, task.task_id, epoch) for task, epoch, _ in taken])
        return steps

    return asyncio.run(go())


def flat(sampler: Sampler, count: int) -> list[tuple[str, int]]:
    """Id and epoch of so many tasks at most."""
    return [(task, epoch) for _, task, epoch in steps_of(sampler, last=1, size=count)[0]]


def test_the_first_epoch_is_the_streams_order_and_later_ones_are_shuffled() -> None:
    order = flat(stream(3), 100)
    assert order[:5] == [(str(i), 0) for i in range(5)]
    epochs = [[task for task, epoch in order if epoch == number] for number in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list("01234")] * 3
    assert epochs[1] != epochs[2]
    assert len(order) == 15


def test_without_a_number_of_epochs_there_is_no_end() -> None:
    assert flat(stream(None), 23)[-1][1] == 4


def test_the_order_depends_on_the_seed_alone() -> None:
    assert flat(stream(4), 100) == flat(stream(4), 100)
    assert flat(stream(4), 100) != flat(stream(4, seed=1), 100)


def test_an_empty_set_ends_at_once() -> None:
    assert flat(StreamSampler(Tasks(0), num_epochs=None, seed=0), 3) == []
    assert flat(easy_to_hard(count=0), 3) == []


def test_without_shuffling_every_epoch_has_the_streams_order() -> None:
    assert [task for task, _ in flat(stream(3, shuffle=False), 100)] == list("01234") * 3


def test_a_pool_ends_after_its_epochs() -> None:
    assert flat(easy_to_hard(2), 100) == [(str(i % 5), i // 5) for i in range(10)]


def test_a_refill_has_none_of_the_tasks_of_its_step() -> None:
    for step in steps_of(random_tasks(12), last=20, size=6, refills=3):
        assert len({task for _, task, _ in step}) == 12


SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "stream": lambda: stream(None),
    "easy to hard": easy_to_hard,
    "random": random_tasks,
    "weighted": mixed,
    "in turn": lambda: mixed("in_turn"),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_after_a_restart_between_any_two_takes_a_sampler_goes_on_as_if_there_had_been_none(name: str) -> None:
    build = SAMPLERS[name]
    whole = steps_of(build(), last=9, size=3, refills=1)
    on_record = [
        [Tried(number, taskset, task) for taskset, task, _ in step] for number, step in enumerate(whole, 1)
    ]
    for killed in range(1, 10):
        before = list(chain.from_iterable(on_record[: killed - 1]))
        again = steps_of(build(), first=killed, last=9, size=3, refills=1, tried=before)
        assert again == whole[killed - 1 :]
        # within the step, before its refill
        begun = [*before, *on_record[killed - 1][:3]]
        refill = asyncio.run(_refill(build(), begun, killed))
        assert refill == whole[killed - 1][3:]


async def _refill(sampler: Sampler, tried: Sequence[Tried], step: int) -> Step:
    await sampler.resume(tried)
    taken = await sampler.take(2, step=step, refill=1)
    return [(task.taskset, task.task_id, epoch) for task, epoch, _ in taken]


def test_a_weighted_mix_has_each_set_as_often_as_its_weight_says() -> None:
    steps = steps_of(mixed(counts=(2000, 2000)), last=100, size=20)
    counts = Counter(taskset for step in steps for taskset, *_ in step)
    # a standard deviation is 19
    np.testing.assert_allclose(counts["b"] / 2000, 0.75, atol=0.04)


def test_in_turn_each_set_comes_once_a_round_and_an_ended_one_leaves_its_share() -> None:
    steps = steps_of(mixed("in_turn", counts=(1, 4)), last=3, size=3)
    order = [taskset for step in steps for taskset, *_ in step]
    assert order == ["a", "b", "a", "b", "b", "b"]


def test_every_task_of_every_set_comes_as_often_as_its_set_has_epochs() -> None:
    both: tuple[Mix, ...] = ("weighted", "in_turn")
    for mix in both:
        counts = Counter(chain.from_iterable(steps_of(mixed(mix), last=9, size=3)))
        assert set(counts.values()) == {1}
        of_sets = Counter((taskset, epoch) for taskset, _, epoch in counts)
        assert of_sets == {("a", 0): 6, ("a", 1): 6, ("b", 0): 9}
