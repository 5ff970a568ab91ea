"""In every `sync_style` no step is begun with weights that are too old, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from trinity_data.config import SynchronizerConfig
from trinity_data.sync_rules import ExplorerDriven, TrainerDriven
from trinity_data.synchronizer import Synchronizer
from trinity_data.weights import WeightFolders, Weights

STEPS = 30


class Schedule:
    """An explorer and a trainer that are as fast as the seed has it, and an explorer that is started anew."""

    def __init__(
        self, config: SynchronizerConfig, max_staleness: int | None, folder: Path, *, inflight: int, seed: int
    ) -> None:
        folders = WeightFolders(folder, "checkpoint")
        self.sync = Synchronizer(config, first_step=4, folders=folders, max_staleness=max_staleness)
        self.random, self.inflight = random.Random(seed), inflight
        self.seconds = {side: self.random.choice([1, 3, 9, 27]) for side in ("explorer", "trainer")}
        self.begun: dict[int, int] = {}
        """The version that each step was begun with."""
        self.published: list[int] = []

    async def work(self, side: str) -> None:
        for _ in range(self.random.randrange(self.seconds[side])):
            await asyncio.sleep(0)

    async def explore(self) -> None:
        loaded, free, ends = -1, asyncio.Semaphore(self.inflight), dict[int, asyncio.Task[None]]()
        for step in range(4, 4 + STEPS):
            await free.acquire()
            if self.random.random() < 0.1:
                loaded = -1
            if (before := ends.get(self.sync.required_version(step))) is not None:
                await before
            assert await self.sync.wait_to_explore(step)
            loaded = max(loaded, self.sync.version_to_load(step, loaded=loaded))
            self.begun[step] = loaded
            ends[step] = asyncio.create_task(self.end(step, ends.get(step - 1), free))
        await ends[step]
        await self.sync.no_more_steps(step)

    async def end(self, step: int, before: asyncio.Task[None] | None, free: asyncio.Semaphore) -> None:
        await self.work("explorer")
        if before is not None:
            await before
        await self.sync.finished_exploring(step)
        free.release()

    async def train(self) -> None:
        step = 3
        await self.publish(step)
        while await self.sync.answer_requests(self.sync.wait_explored(step + 1), self.publish):
            step += 1
            await self.work("trainer")
            if self.sync.publishes_version(step):
                await self.publish(step)
            await self.sync.finished_training(step)

    async def publish(self, version: int) -> None:
        self.published.append(version)
        await self.sync.publish(Weights(version, "folder"))

    def run(self) -> None:
        async def both() -> None:
            await asyncio.wait_for(asyncio.gather(self.explore(), self.train()), 60)

        asyncio.run(both())


def drawn(style: str, seed: int) -> tuple[SynchronizerConfig, int | None, int]:
    """A configuration that is allowed, its limit of staleness, and the steps that may be under way."""
    draw = random.Random(seed)
    key = {"fixed": "sync_interval", "explorer_driven": "explorer_sync_interval"}
    values: dict[str, Any] = {
        "sync_style": style,
        key.get(style, "trainer_sync_interval"): draw.randint(1, 5),
    }
    if style == "fixed":
        values["sync_offset"] = draw.randint(0, 3)
    config = SynchronizerConfig(**values)
    more = 0 if style == "fixed" else draw.choice([0, 0, 1, 4, None])
    return config, None if more is None else config.least_staleness + more, draw.randint(1, 3)


@pytest.mark.parametrize("style", ["fixed", "explorer_driven", "trainer_driven", "fully_async"])
def test_no_step_is_begun_with_weights_that_are_too_old_and_every_step_is_begun(
    style: str, tmp_path: Path
) -> None:
    oldest = 0
    for seed in range(50):
        config, limit, inflight = drawn(style, seed)
        schedule = Schedule(config, limit, tmp_path, inflight=inflight, seed=seed)
        schedule.run()
        assert list(schedule.begun) == list(range(4, 4 + STEPS))
        ages = [step - 1 - version for step, version in schedule.begun.items()]
        assert min(ages) >= 0
        if limit is not None:
            assert max(ages) <= limit, (seed, config, limit)
            oldest = max(oldest, max(ages))
    assert oldest > 3  # some schedules use their whole limit


def test_an_explorer_that_drives_has_one_version_from_request_to_request(tmp_path: Path) -> None:
    config = SynchronizerConfig(sync_style="explorer_driven", explorer_sync_interval=4)
    schedule = Schedule(config, 3, tmp_path, inflight=1, seed=1)
    schedule.random.random = lambda: 1.0  # type: ignore[method-assign]  # no start in between
    schedule.run()
    versions = [schedule.begun[step] for step in range(4, 4 + STEPS)]
    assert versions == [versions[i // 4 * 4] for i in range(STEPS)]
    # nothing is published that no step is explored with
    assert schedule.published == sorted(set(versions))


def test_a_trainer_that_drives_publishes_at_its_interval_and_no_step_waits_for_more() -> None:
    rule = TrainerDriven(base=3, interval=3, max_staleness=4, loads_at_any_time=False)
    assert [version for version in range(0, 14) if rule.publishes(version)] == [3, 6, 9, 12]
    assert [rule.required_version(step) for step in range(4, 12)] == [3, 3, 3, 3, 3, 4, 5, 6]
    assert rule.version_to_load(9, before=8, loaded=3, newest=6) == 6


def test_an_explorer_that_drives_requests_so_much_that_no_step_before_the_next_request_is_too_stale() -> None:
    rule = ExplorerDriven(base=3, interval=3, max_staleness=2)
    assert [rule.required_version(step) for step in range(4, 13)] == [3, 3, 3, 6, 6, 6, 9, 9, 9]
    assert [rule.requested_version(step, before=step - 1, trained=8) for step in (7, 8, 10)] == [8, 6, 9]
    loads = [rule.version_to_load(step, before=step - 1, loaded=6, newest=8) for step in (7, 8, 10, 11)]
    assert loads == [8, 6, 8, 8]


def test_an_explorer_requests_in_every_interval_of_which_another_had_the_first_step() -> None:
    rule = ExplorerDriven(base=0, interval=3, max_staleness=9)
    # it has the steps 1, 3, 5, 6, 8; the first ones of the second and third interval are 4 and 7
    steps = [(3, 1), (5, 3), (6, 5), (8, 6)]
    assert [rule.requested_version(step, before=before, trained=2) for step, before in steps] == [0, 2, 0, 2]


def test_without_a_limit_no_step_waits_for_weights() -> None:
    for rule in (ExplorerDriven(0, 5, None), TrainerDriven(0, 5, None, loads_at_any_time=True)):
        assert {rule.required_version(step) for step in range(1, 99)} == {0}
