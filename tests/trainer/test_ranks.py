from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from trinity_data.config import AlgorithmConfig, OptimizerConfig, TrainerConfig
from trinity_trainer.group import TrainerGroup, start_trainer
from trinity_trainer.step import StageSpec

pytestmark = pytest.mark.usefixtures("ray_session")


def spec(algorithm_type: str = "grpo", **changes: Any) -> StageSpec:
    algorithm = AlgorithmConfig(
        algorithm_type=algorithm_type,
        repeat_times=8,
        optimizer=OptimizerConfig(lr=1e-3),
        **({"kl_loss_fn": "none"} | changes),
    )
    return StageSpec(algorithm, TrainerConfig(max_token_len_per_gpu=200, grad_clip=1.0), 10, 128)


def batch(num_rows: int = 12, *, seed: int = 0, sampled: bool = True) -> pa.Table:
    random = np.random.default_rng(seed)
    prompts, responses = random.integers(3, 9, num_rows), random.integers(2, 20, num_rows)
    return pa.table(
        {
            "experience_id": [f"row-{i}" for i in range(num_rows)],
            "token_ids": pa.array(
                [random.integers(0, 256, p + r).tolist() for p, r in zip(prompts, responses, strict=True)], pa.list_(pa.int32())
            ),
            "logprobs": pa.array([[-2.0] * r if sampled else [] for r in responses], pa.list_(pa.float32())),
            "action_mask": pa.array([[True] * r for r in responses], pa.list_(pa.bool_())),
            "prompt_length": pa.array(prompts, pa.int32()),
            "advantage": random.normal(size=num_rows),
            "temperature": pa.array([1.0] * num_rows, pa.float32()),
        }
    )


async def trained(model: Path, world_size: int, stage: StageSpec, steps: int = 2) -> tuple[TrainerGroup, list[dict[str, float]]]:
    group = await start_trainer(str(model), world_size=world_size, num_gpus=0)
    await group.start_stage(stage, reference_path=str(model))
    metrics = [(await group.train_step(batch(seed=step)))[0] for step in range(steps)]
    return group, metrics


def test_two_ranks_take_the_same_steps_as_one(tiny_model: Path, tmp_path: Path) -> None:
    async def losses(world_size: int) -> list[dict[str, float]]:
        group, metrics = await trained(tiny_model, world_size, spec(), steps=3)
        group.kill()
        return metrics

    one, two = asyncio.run(losses(1)), asyncio.run(losses(2))
    for name in ("loss", "grad_norm", "num_tokens", "clipped_share", "logprob_diff_max"):
        assert [m[name] for m in two] == pytest.approx([m[name] for m in one], rel=2e-4, abs=1e-6), name
    assert one[0]["loss"] != one[1]["loss"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_of_one_rank_goes_on_with_any_number(tiny_model: Path, tmp_path: Path, world_size: int) -> None:
    async def go() -> tuple[float, float]:
        group, _ = await trained(tiny_model, 1, spec())
        await group.save(tmp_path / "global_step_2", {"step": 2}, with_huggingface=True)
        expected = (await group.train_step(batch(seed=9)))[0]["loss"]
        group.kill()
        resumed = await start_trainer(str(tiny_model), world_size=world_size, num_gpus=0)
        await resumed.start_stage(spec(), reference_path=str(tiny_model))
        await resumed.load(tmp_path / "global_step_2", with_optimizer=True)
        first = (await resumed.train_step(batch(seed=9)))[0]["loss"]
        second = (await resumed.train_step(batch(seed=10)))[0]["loss"]
        resumed.kill()
        assert second != first
        return expected, first

    expected, resumed = asyncio.run(go())
    assert resumed == pytest.approx(expected, rel=1e-4)


def test_the_checkpoint_has_the_documented_files_and_transformers_loads_it(tiny_model: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    async def go() -> list[float]:
        group, _ = await trained(tiny_model, 2, spec())
        await group.save(tmp_path / "global_step_2", {"step": 2}, with_huggingface=True)
        _, effects = await group.train_step(batch(num_rows=3, seed=5))
        group.kill()
        return list(effects["logprobs"].to_pylist()[0])

    recomputed = asyncio.run(go())
    actor = tmp_path / "global_step_2" / "actor"
    for rank in (0, 1):
        for kind in ("model", "optim", "extra_state"):
            assert (actor / f"{kind}_world_size_2_rank_{rank}.safetensors").exists()
    assert (actor / "fsdp_config.json").exists()
    model = AutoModelForCausalLM.from_pretrained(actor / "huggingface", dtype=torch.float32)
    AutoTokenizer.from_pretrained(actor / "huggingface")
    row = batch(num_rows=3, seed=5).slice(0, 1).to_pylist()[0]
    logprobs = torch.log_softmax(model(torch.tensor([row["token_ids"]])).logits.float(), -1)[0]
    start = row["prompt_length"]
    expected = [logprobs[t - 1, row["token_ids"][t]].item() for t in range(start, len(row["token_ids"]))]
    assert recomputed == pytest.approx(expected, abs=1e-5)


def test_supervised_rows_need_no_logprobs_and_the_loss_is_the_mean_negative_logprob(tiny_model: Path) -> None:
    async def go() -> tuple[dict[str, float], list[list[float]]]:
        group = await start_trainer(str(tiny_model), world_size=1, num_gpus=0)
        await group.start_stage(spec("sft"), reference_path=str(tiny_model))
        metrics, effects = await group.train_step(batch(sampled=False))
        group.kill()
        return metrics, effects["logprobs"].to_pylist()

    metrics, logprobs = asyncio.run(go())
    tokens = [value for row in logprobs for value in row]
    assert metrics["loss"] == pytest.approx(-sum(tokens) / len(tokens), rel=1e-5)
    assert metrics["num_tokens"] == len(tokens)


def test_dpo_prefers_the_chosen_rows_after_a_few_steps(tiny_model: Path) -> None:
    async def go() -> list[dict[str, float]]:
        group = await start_trainer(str(tiny_model), world_size=2, num_gpus=0)
        stage = spec("dpo", kl_loss_fn="none")
        await group.start_stage(stage, reference_path=str(tiny_model))
        metrics = [(await group.train_step(batch(num_rows=6, sampled=False)))[0] for _ in range(4)]
        group.kill()
        return metrics

    metrics = asyncio.run(go())
    assert metrics[0]["loss"] == pytest.approx(0.693147, abs=1e-4)
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert metrics[-1]["accuracy"] == pytest.approx(1.0)
