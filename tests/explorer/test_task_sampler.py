from __future__ import annotations

import asyncio

from trinity_data.dataset.task import Task
from trinity_explorer.explorer import TaskSampler


class CreditLimiter:
    def __init__(self, count: int) -> None:
        self.remaining = [Task(f"{i}", "sums", "", (), "", "", "") for i in range(count)][::-1]

    async def next(self) -> Task | None:
        return self.remaining.pop() if self.remaining else None


def taken(
    num_epochs: int | None, *, limit: int = 100, skip: int = 0, seed: int = 0, shuffle: bool = True
) -> list[tuple[str, int]]:
    async def go() -> list[tuple[str, int]]:
        order = TaskSampler(CreditLimiter(5), num_epochs=num_epochs, seed=seed, shuffle=shuffle)
        await order.skip(skip)
        tasks: list[tuple[str, int]] = []
        while len(tasks) < limit and (item := await order.next()) is not None:
            tasks.append((item[0].task_id, item[1]))
        return tasks

    return asyncio.run(go())


def test_the_first_epoch_is_the_streams_order_and_later_ones_are_shuffled() -> None:
    order = taken(3)
    assert order[:5] == [(str(i), 0) for i in range(5)]
    epochs = [[task for task, epoch in order if epoch == number] for number in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list("01234")] * 3
    assert epochs[1] != epochs[2]
    assert len(order) == 15


def test_without_a_number_of_epochs_there_is_no_end() -> None:
    assert taken(None, limit=23)[-1][1] == 4


def test_the_order_depends_on_the_seed_alone() -> None:
    assert taken(4) == taken(4)
    assert taken(4) != taken(4, seed=1)


def test_skipping_goes_on_where_the_run_before_had_stopped() -> None:
    assert taken(3, skip=8) == taken(3)[8:]


def test_an_empty_set_ends_at_once() -> None:
    async def go() -> object:
        return await TaskSampler(CreditLimiter(0), num_epochs=None, seed=0).next()

    assert asyncio.run(go()) is None


def test_without_shuffling_every_epoch_has_the_streams_order() -> None:
    assert [task for task, _ in taken(3, shuffle=False)] == list("01234") * 3
