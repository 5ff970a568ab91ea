"""Trainer ranks that start once: one alone, and two together.

Tests put the first weights back before they train.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.trainer.bench import Bench
from trinity_data.config import AlgorithmConfig, OptimizerConfig, TrainerConfig
from trinity_data.store.store import Store
from trinity_trainer.stage_spec import StageSpec
from trinity_trainer.worker_group import WorkerGroup, start_trainer

T = TypeVar("T")


def stage_spec(
    algorithm_type: str = "grpo",
    *,
    shared_prompts: bool = True,
    rows: int | None = None,
    reference_checkpoint: Path | None = None,
    **changes: Any,
) -> StageSpec:
    """Micro-batches of 200 tokens, so that a batch needs several; or of so many rows."""
    algorithm = AlgorithmConfig(
        algorithm_type=algorithm_type,
        repeat_times=8,
        optimizer=OptimizerConfig(lr=1e-3),
        **({"kl_loss_fn": "none"} | changes),
    )
    trainer = TrainerConfig(
        max_token_len_per_gpu=200,
        grad_clip=1.0,
        shared_prompts=shared_prompts,
        use_dynamic_bsz=rows is None,
        micro_batch_size_per_gpu=rows,
    )
    checkpoint = None if reference_checkpoint is None else str(reference_checkpoint)
    return StageSpec(algorithm, trainer, 10, 128, reference_checkpoint=checkpoint)


@dataclass
class Ranks:
    """Groups by their number of ranks."""

    groups: dict[int, WorkerGroup]
    model: Path
    first: Path
    loop: asyncio.AbstractEventLoop

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    @staticmethod
    def spec(algorithm_type: str, **changes: Any) -> StageSpec:
        return stage_spec(algorithm_type, **changes)

    def begin(self, world_size: int, algorithm_type: str = "grpo", **changes: Any) -> WorkerGroup:
        """A new stage with the first weights."""
        group = self.groups[world_size]
        spec = stage_spec(algorithm_type, **changes)
        self.run(group.start_stage(spec, reference_path=str(self.model)))
        self.run(group.load(self.first, with_optimizer=False))
        return group


@pytest.fixture(scope="session")
def ranks(tiny_model: Path, ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    loop = asyncio.new_event_loop()

    async def start() -> dict[int, WorkerGroup]:
        groups = {size: start_trainer(world_size=size, num_gpus=0) for size in (1, 2)}
        await asyncio.gather(*(group.load_model(str(tiny_model)) for group in groups.values()))
        return groups

    groups = loop.run_until_complete(start())
    first = tmp_path_factory.mktemp("first") / "global_step_0"
    loop.run_until_complete(groups[1].start_stage(stage_spec(), reference_path=str(tiny_model)))
    loop.run_until_complete(groups[1].save(first, {"step": 0}, with_huggingface=False))
    yield Ranks(groups, tiny_model, first, loop)
    for group in groups.values():
        group.kill()
    loop.close()


@pytest.fixture
def bench(ranks: Ranks, tmp_path: Path) -> Iterator[Bench]:
    ranks.begin(1, "sft")
    store = Store.create_or_open(tmp_path / "store")
    made = Bench(ranks, tmp_path, store)
    yield made
    made.store.close()
