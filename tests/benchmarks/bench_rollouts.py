"""Rollouts a second through explorer, operators and ledger, with an engine that answers at once.

Everything but the engine is what a run uses: chat template, workflow, reward, writer,
five operators, durable store.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path

from trinity_data.config import (
    AlgorithmConfig,
    BufferConfig,
    ExplorerConfig,
    ModelConfig,
    RolloutArgs,
    StageConfig,
    TasksetConfig,
)
from trinity_data.config.buffer import ExplorerInput
from trinity_data.dataset.task import Task
from trinity_data.monitor import NoMonitor
from trinity_data.processes import relaxed_gc
from trinity_data.reporter import Reporter
from trinity_data.schema import content_id
from trinity_data.status import Status
from trinity_data.store.protocol import WritableStore
from trinity_data.store.store import Store
from trinity_data.synchronizer import Synchronizer
from trinity_data.synthetic.model import write_model
from trinity_data.tokenizer import ChatTemplate, load_tokenizer
from trinity_explorer.curriculum.samplers import StreamSampler
from trinity_explorer.engines.fake import FakeEngine, guess_arithmetic
from trinity_explorer.engines.pool import EnginePool
from trinity_explorer.evaluator import Evaluator
from trinity_explorer.explorer import Explorer
from trinity_explorer.rollout import RolloutRunner
from trinity_explorer.steps import OwnSteps
from trinity_explorer.workflows.registry import WorkflowSpec, build_workflow
from trinity_operators.advantages import GrpoAdvantage
from trinity_operators.experience_pipeline import ExperiencePipeline, ExperienceWriter
from trinity_operators.filters import RewardStdFilter
from trinity_operators.mappers import QualityScore, RewardShapingMapper


class Problems:
    """Endless sums."""

    def __init__(self) -> None:
        self.count = 0

    async def next(self) -> Task:
        self.count += 1
        question = (
            f"Ann has {self.count % 97} apples. She buys {self.count % 13} more. "
            "How many apples does Ann have?"
        )
        answer = f"#### {self.count % 97 + self.count % 13}"
        messages = ({"role": "user", "content": question},)
        return Task(content_id(self.count), "sums", question, messages, answer, "math_workflow", "")


def build(
    folder: Path, store: WritableStore, batch_size: int, repeat_times: int, *, name: str = "explorer"
) -> Explorer:
    """With a model of its own in `folder`."""
    tokenizer = load_tokenizer(str(write_model(folder / "model", corpus=["Ann has 1 apples"] * 50, seed=0)))
    engines = EnginePool([FakeEngine(tokenizer, script=guess_arithmetic)])
    template = ChatTemplate(tokenizer, None, max_prompt_tokens=None, truncate=False)
    workflow = build_workflow(WorkflowSpec("math_workflow"))
    taskset = TasksetConfig(
        name="sums", path="sums", repeat_times=repeat_times, rollout_args=RolloutArgs(max_tokens=64)
    )
    stage = StageConfig(
        stage_name="bench",
        algorithm=AlgorithmConfig(algorithm_type="grpo"),
        model=ModelConfig(model_path="x"),
        buffer=BufferConfig(batch_size=batch_size, explorer_input=ExplorerInput(taskset=taskset)),
        explorer=ExplorerConfig(name=name, runner_per_model=10_000, max_timeout=60, max_retry_times=0),
    )
    runner = RolloutRunner(stage.explorer, engines, template, lambda task: workflow, seed=0)
    reporter = Reporter(stage, store, Status("bench"), NoMonitor())
    shaping = RewardShapingMapper(
        reward_shaping_configs=[{"stats_key": "quality", "op_type": "ADD", "weight": 0.1}]
    )
    operators = [RewardStdFilter(), QualityScore(), shaping, GrpoAdvantage()]
    return Explorer(
        stage,
        store=store,
        runner=runner,
        tasks=StreamSampler(Problems(), num_epochs=1, seed=0),
        writer=ExperienceWriter(store, ExperiencePipeline(operators, "bench"), explorer=name),
        evaluator=Evaluator(stage, [], store=store, runner=runner, reporter=reporter, first_step=1),
        steps=OwnSteps(
            store, "bench", Synchronizer(stage.synchronizer, trained=10**9), explorer=stage.explorer.name
        ),
        reporter=reporter,
    )


async def measure_rates(explorer: Explorer, steps: int) -> list[float]:
    rates: list[float] = []
    for step in range(1, steps + 1):
        started = time.perf_counter()
        await explorer.explore_step(step)
        rollouts = explorer.batch_size * sum(explorer.repeat_times.values())
        rates.append(rollouts / (time.perf_counter() - started))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--repeat-times", type=int, default=8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Store.create_or_open(Path(folder) / "store")
        explorer = build(Path(folder), store, arguments.batch_size, arguments.repeat_times)
        with relaxed_gc():
            rates = asyncio.run(measure_rates(explorer, arguments.steps))
        store.close()
    print(
        f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, {arguments.batch_size} × "
        f"{arguments.repeat_times} a step"
    )
    print(
        f"rollouts/s: median {statistics.median(rates):,.0f}, best {max(rates):,.0f}, worst {min(rates):,.0f}"
    )


if __name__ == "__main__":
    main()
