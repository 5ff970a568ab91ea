"""Of two sides that share GPUs one is awake at a time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from trinity_data.config import SynchronizerConfig
from trinity_data.synchronizer import Synchronizer
from trinity_data.turns import Turns
from trinity_data.weights import WeightFolders, Weights


@dataclass
class Side:
    name: str
    order: list[str]
    awake: set[str]

    async def sleep(self) -> None:
        await asyncio.sleep(0)
        self.awake.discard(self.name)

    async def wake(self) -> None:
        await asyncio.sleep(0)
        self.awake.add(self.name)

    async def work(self, step: int) -> None:
        assert self.awake == {self.name}
        await asyncio.sleep(0)
        assert self.awake == {self.name}
        self.order.append(f"{self.name[0]}{step}")


@dataclass
class SharedGpu:
    """An explorer and a trainer that share one."""

    sync: Synchronizer
    last_step: int = 4
    order: list[str] = field(default_factory=list)

    def run(self) -> list[str]:
        """What they did, in its order."""

        async def both() -> None:
            awake = set[str]()
            explorer, trainer = (Side(name, self.order, awake) for name in ("explorer", "trainer"))
            self.sync.turns = Turns({"explorer": explorer, "trainer": trainer})
            await self.sync.begin_turn("trainer")
            await self.sync.publish(Weights(0, "folder"))
            await asyncio.wait_for(asyncio.gather(self.explore(explorer), self.train(trainer)), 20)
            assert not awake

        asyncio.run(both())
        return self.order

    async def explore(self, side: Side) -> None:
        for step in range(1, self.last_step + 1):
            assert await self.sync.wait_to_explore(step)
            await self.sync.begin_turn("explorer")
            await side.work(step)
            await self.sync.finished_exploring(step)
        await self.sync.no_more_steps(self.last_step)
        await self.sync.end_turn("explorer")

    async def train(self, side: Side) -> None:
        step = 0

        async def publish(version: int) -> None:
            await self.sync.begin_turn("trainer")
            await self.sync.publish(Weights(version, "folder"))

        while await self.sync.answer_requests(self.sync.wait_explored(step + 1), publish):
            step += 1
            await self.sync.begin_turn("trainer")
            await side.work(step)
            if self.sync.publishes_version(step):
                await publish(step)
            await self.sync.finished_training(step)
        await self.sync.end_turn("trainer")


@pytest.mark.parametrize(
    ("settings", "order"),
    [
        ({}, "e1 t1 e2 t2 e3 t3 e4 t4"),
        # a side keeps the GPU as long as it has something to do
        ({"sync_interval": 2}, "e1 e2 t1 t2 e3 e4 t3 t4"),
        ({"sync_offset": 1}, "e1 e2 t1 t2 e3 e4 t3 t4"),
    ],
)
def test_a_side_has_the_gpu_until_it_waits_for_the_other(
    tmp_path: Path, settings: dict[str, int], order: str
) -> None:
    folders = WeightFolders(tmp_path, "checkpoint")
    sync = Synchronizer(SynchronizerConfig.model_validate(settings), folders=folders)
    assert SharedGpu(sync).run() == order.split()
