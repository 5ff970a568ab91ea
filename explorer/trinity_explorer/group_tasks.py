"""Groups that run beside each other, those of a step and those that are late."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.dataset.task import TASK_COLUMNS, tasks_from_table
from trinity_data.schema import values_of
from trinity_data.store.protocol import ReadableStore
from trinity_explorer.rollout import Group


class GroupTasks:
    """Each group runs as a task of the event loop; one that fails ends every wait for them."""

    def __init__(self) -> None:
        self._groups: dict[asyncio.Task[None], Group] = {}
        self._left = Counter[int]()
        self._failure: BaseException | None = None
        self._waiting: set[asyncio.Future[None]] = set()

    @property
    def groups(self) -> list[Group]:
        """Those that are not whole, in the order in which they were begun."""
        return list(self._groups.values())

    def left(self, step: int) -> int:
        """How many groups of a step are not whole."""
        return self._left[step]

    def start(self, group: Group, work: Coroutine[Any, Any, None]) -> None:
        """The group is whole when `work` is done."""
        task = asyncio.get_running_loop().create_task(work)
        self._groups[task] = group
        self._left[group.step] += 1
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        group = self._groups.pop(task)
        self._left[group.step] -= 1
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    async def wait(self, is_enough: Callable[[], bool]) -> None:
        """Asks again whenever a group has ended. Raises what a group raised."""
        while True:
            if self._failure is not None:
                raise self._failure
            if is_enough():
                return
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.add(waiting)
            try:
                await waiting
            finally:
                self._waiting.discard(waiting)

    async def cancel(self) -> None:
        """Ends all of them as they are; what they have stored remains."""
        tasks = list(self._groups)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def stored_groups(store: ReadableStore, recorded: pa.Table) -> list[Group]:
    """Of rows of `groups` of one stage, with their tasks."""
    if not recorded.num_rows:
        return []
    task_ids = values_of(pc.unique(recorded["task_id"]))
    tasks = store.tasks(task_ids, stage=recorded["stage"][0].as_py(), columns=TASK_COLUMNS)
    by_id = {task.task_id: task for task in tasks_from_table(tasks)}
    return [Group.from_row(row, by_id[row["task_id"]]) for row in recorded.to_pylist()]
