"""A small run as an explorer records it, and the pipeline file it ran under."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from trinity_data.config import RunConfig, load_pipeline_file
from trinity_data.launch.pipelines import experience_operators
from trinity_data.schema import experience_id, group_id, rows_to_table
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_operators.experience_pipeline import ExperiencePipeline, ExperienceWriter

Pipeline = Callable[..., RunConfig]

# raw rewards of the groups of each step
REWARDS = {1: [[0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]], 2: [[0.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5]]}

FILE = """
project: tests
name: run
checkpoint_root_dir: {root}
algorithm:
  algorithm_type: grpo
  repeat_times: 4
  advantage_fn_args: {arguments}
model:
  model_path: synthetic://qwen2-1m
  max_prompt_tokens: 64
  max_response_tokens: 32
buffer:
  batch_size: 2
  total_steps: 2
  explorer_input:
    taskset:
      name: gsm8k
      path: synthetic://gsm8k
      format: {{prompt_key: question, response_key: answer}}
      default_workflow_type: math_workflow
data_processor:
  experience_pipeline:
    operators: {operators}
stages:
  - stage_name: rl
"""

THEN = "[{name: reward_std_filter}]"


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    """The file that ran, or one with other operators or other arguments of the advantage."""

    def write(operators: str = THEN, arguments: str = "{}") -> RunConfig:
        file = tmp_path / "pipeline.yaml"
        file.write_text(FILE.format(root=tmp_path, operators=operators, arguments=arguments))
        return load_pipeline_file(file)

    return write


def rows(step: int, position: int, rewards: list[float], error: str = "") -> list[dict[str, object]]:
    group = group_id("explorer", "rl", step, position)
    return [
        {
            "experience_id": experience_id(group, rollout),
            "task_id": f"task-{position}",
            "group_id": group,
            "stage": "rl",
            "step": step,
            "position": position,
            "rollout": rollout,
            "turn": 0,
            "token_ids": [1, 2, 3],
            "logprobs": [-0.5, -0.5],
            "action_mask": [True, True],
            "response_length": 2,
            "messages": [{"role": "user", "content": f"question {position}"}],
            "response_text": f"a{rollout}",
            "reward": reward,
            "error": error,
        }
        for rollout, reward in enumerate(rewards)
    ]


@pytest.fixture
def run(tmp_path: Path, pipeline: Pipeline) -> Path:
    """What an explorer records under `THEN`, with a failed group in step 2; step 1 was trained."""
    return explored(pipeline(), tmp_path)


def explored(config: RunConfig, tmp_path: Path) -> Path:
    """The same under the pipeline of a file in `tmp_path`."""
    job = tmp_path / "tests" / "run"
    job.mkdir(parents=True)
    (job / "config.json").write_text(config.model_dump_json())
    store = Store.create_or_open(job / "store")
    pipeline_then = ExperiencePipeline(experience_operators(config.stages[0], tmp_path), "rl")
    writer = ExperienceWriter(store, pipeline_then, explorer="explorer")

    async def explore(step: int) -> None:
        for position, rewards in enumerate(REWARDS[step]):
            group = rows(step, position, rewards)
            await writer.add_group(group, group)

    for step in REWARDS:
        named = [
            {
                "group_id": group_id("explorer", "rl", step, n),
                "stage": "rl",
                "step": step,
                "position": n,
                "round": 0,
            }
            for n in range(3 if step == 2 else 2)
        ]
        store.commit(Commit(tables={"groups": rows_to_table("groups", named)}))
        asyncio.run(explore(step))
        if step == 2:
            broken = rows_to_table("experiences", rows(2, 2, [0.0], error="broke"))
            store.commit(Commit(tables={"experiences": broken}))
        store.commit(
            Commit(tables={"operators": pipeline_then.counts_table(step)}, progress={"explored/rl": step})
        )
        if step == 1:
            store.form_batch("rl", 1, store.pending("rl"))
            store.commit(Commit(tables={"steps": rows_to_table("steps", [{"step": 1, "stage": "rl"}])}))
    store.close()
    return job
