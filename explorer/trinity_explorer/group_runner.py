"""The rollouts of a group, from the engines into the store."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from trinity_data.config import StageConfig
from trinity_data.schema import TABLES, experience_id
from trinity_data.status import Status
from trinity_data.store.protocol import WritableStore
from trinity_data.store.types import State
from trinity_explorer.chat import RequestBatcher
from trinity_explorer.dynamic_timeout import DynamicTimeout
from trinity_explorer.rollout import Group, RolloutRunner, Row, outcome_of, train_sampling
from trinity_explorer.slots import RolloutEngines
from trinity_operators.experience_pipeline import ExperienceWriter


class GroupRunner:
    """Of one explorer in one stage."""

    def __init__(
        self,
        stage: StageConfig,
        *,
        store: WritableStore,
        runner: RolloutRunner,
        writer: ExperienceWriter,
        status: Status,
    ) -> None:
        self.store, self.runner, self.writer, self.status = store, runner, writer, status
        self.sampling = train_sampling(stage)
        self.source: Row = {"explorer": stage.explorer.name, "engine": runner.engines.name}
        self.timeout = DynamicTimeout(stage.explorer)
        self.num_running = 0
        """Rollouts of the groups that were begun which have not ended."""

    def run(self, group: Group, stored: Mapping[str, State]) -> Coroutine[Any, Any, None]:
        """Runs what is missing of a group; one that a killed run had begun passes through the pipeline.

        `stored` are the rows of the group's step.
        """
        self.num_running += group.repeat_times
        return self._run(group, stored)

    async def _run(self, group: Group, stored: Mapping[str, State]) -> None:
        whole_steps = self.writer.pipeline.whole_steps
        missing = [
            number
            for number in range(group.repeat_times)
            if not stored or experience_id(group.group_id, number) not in stored
        ]
        complete = len(missing) == group.repeat_times and not whole_steps
        rows = await self._run_rollouts(group, missing, completes_group=complete)
        # those that a killed run had stored
        self.status.rollouts_done += group.repeat_times - len(missing)
        self.num_running -= group.repeat_times - len(missing)
        if complete or whole_steps:
            return
        stored_ids = [row_id for row_id in stored if row_id.startswith(f"{group.group_id}/")]
        # unless the group has its outcomes already
        if rows or any(stored[row_id] is State.RAW for row_id in stored_ids):
            ids = sorted([*stored_ids, *(str(row["experience_id"]) for row in rows)])
            await self.writer.add_stored(self.store.read(ids).select(TABLES["experiences"].names))

    async def _run_rollouts(
        self, group: Group, rollouts: Sequence[int], *, completes_group: bool
    ) -> list[Row]:
        """Runs the rollouts and stores each as it ends.

        With `completes_group`, the last one is stored together with the pipeline's rows about the group.
        """
        engines = RolloutEngines(self.runner.slots, on_one_engine=True)
        group_rows, num_running = list[Row](), len(rollouts)

        async def run(rollout: int) -> None:
            nonlocal num_running
            with await engines.slot() as batcher:
                await self.writer.wait_for_room(group.step)
                rows = await self._rows(group, rollout, batcher)
            group_rows.extend(rows)
            self.timeout.count(rows[-1])
            error, reward, accuracy = outcome_of(rows)
            self.status.count_rollout(error=error, reward=reward, accuracy=accuracy)
            num_running, self.num_running = num_running - 1, self.num_running - 1
            if num_running == 0 and completes_group:
                group_rows.sort(key=lambda row: str(row["experience_id"]))
                await self.writer.add_group(rows, group_rows)
                return
            self.writer.add(rows)
            if num_running == 0:
                await self.writer.flushed()

        async with asyncio.TaskGroup() as running:
            for rollout in rollouts:
                running.create_task(run(rollout))
        return group_rows

    async def _rows(self, group: Group, rollout: int, batcher: RequestBatcher) -> list[Row]:
        taskset = group.task.taskset
        if (made_elsewhere := self.runner.made_elsewhere.get(taskset)) is not None:
            return await made_elsewhere(group, rollout, batcher=batcher, source=self.source)
        return await self.runner.run(
            group, rollout, batcher=batcher, sampling=self.sampling[taskset],
            source=self.source, limit=self.timeout.limit,
        )  # fmt: skip
