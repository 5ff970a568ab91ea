"""Ranks of a real FSDP group on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
import ray
import torch
from ray.exceptions import RayActorError
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from trinity_data.errors import TrainerError
from trinity_data.spare import keep_spare
from trinity_trainer.worker_group import start_trainer

if TYPE_CHECKING:
    from conftest import Ranks


def batch(
    num_rows: int = 12, *, seed: int = 0, sampled: bool = True, temperature: float = 1.0, **columns: list[Any]
) -> pa.Table:
    random = np.random.default_rng(seed)
    prompts, responses = random.integers(3, 9, num_rows), random.integers(2, 20, num_rows)
    tokens = [random.integers(0, 256, p + r).tolist() for p, r in zip(prompts, responses, strict=True)]
    table = pa.table(
        {
            "experience_id": [f"row-{i}" for i in range(num_rows)],
            "token_ids": pa.array(tokens, pa.list_(pa.int32())),
            "logprobs": pa.array([[-2.0] * r if sampled else [] for r in responses], pa.list_(pa.float32())),
            "action_mask": pa.array([[True] * r for r in responses], pa.list_(pa.bool_())),
            "prompt_length": pa.array(prompts, pa.int32()),
            "advantage": random.normal(size=num_rows),
            "temperature": pa.array([temperature] * num_rows, pa.float32()),
        }
    )
    for name, values in columns.items():
        table = table.set_column(
            table.schema.get_field_index(name), name, pa.array(values, table.schema.field(name).type)
        )
    return table


def steps(ranks: Ranks, world_size: int, count: int) -> list[dict[str, float]]:
    """Metrics of the first `count` steps of a new stage."""
    group = ranks.begin(world_size)
    return [ranks.run(group.train_step(batch(seed=step)))[0] for step in range(count)]


def loss_of(ranks: Ranks, world_size: int, seed: int) -> float:
    return ranks.run(ranks.groups[world_size].train_step(batch(seed=seed)))[0]["loss"]


def logprobs_by_transformers(folder: Path, row: dict[str, Any], temperature: float = 1.0) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([row["token_ids"]])).logits[0] / temperature
    logprobs = torch.log_softmax(logits, -1)
    tokens = row["token_ids"]
    return [logprobs[t - 1, tokens[t]].item() for t in range(row["prompt_length"], len(tokens))]


def test_two_ranks_take_the_same_steps_as_one(ranks: Ranks) -> None:
    one, two = steps(ranks, 1, 3), steps(ranks, 2, 3)
    for name in ("loss", "grad_norm", "num_tokens", "clipped_share", "logprob_diff_max"):
        assert [m[name] for m in two] == pytest.approx([m[name] for m in one], rel=2e-4, abs=1e-6), name
    assert one[0]["loss"] != one[1]["loss"]


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 1), (1, 2), (2, 1)])
def test_a_checkpoint_of_any_number_of_ranks_goes_on_with_any(
    ranks: Ranks, tmp_path: Path, saved_by: int, loaded_by: int
) -> None:
    steps(ranks, saved_by, 2)
    folder = tmp_path / "global_step_2"
    ranks.run(ranks.groups[saved_by].save(folder, {"step": 2}, with_huggingface=False))
    expected = [loss_of(ranks, saved_by, seed) for seed in (9, 10)]
    resumed = ranks.begin(loaded_by)
    ranks.run(resumed.load(folder, with_optimizer=True))
    found = [loss_of(ranks, loaded_by, seed) for seed in (9, 10)]
    assert found == (expected if saved_by == loaded_by else pytest.approx(expected, rel=1e-4))
    # without the moments and the step count the second loss is another one
    ranks.run(ranks.begin(loaded_by).load(folder, with_optimizer=False))
    assert loss_of(ranks, loaded_by, 9) == pytest.approx(expected[0], rel=1e-4)
    assert loss_of(ranks, loaded_by, 10) != pytest.approx(expected[1], rel=1e-4)


def test_the_checkpoint_has_the_documented_files_and_transformers_loads_it(
    ranks: Ranks, tmp_path: Path
) -> None:
    steps(ranks, 2, 2)
    group = ranks.groups[2]
    ranks.run(group.save(tmp_path / "global_step_2", {"step": 2}, with_huggingface=True))
    rows = batch(num_rows=3, seed=5).set_column(6, "temperature", pa.array([1.0, 0.5, 0.0], pa.float32()))
    _, effects = ranks.run(group.train_step(rows))
    actor = tmp_path / "global_step_2" / "actor"
    for rank in (0, 1):
        for kind in ("model", "optim", "extra_state"):
            assert (actor / f"{kind}_world_size_2_rank_{rank}.safetensors").exists()
    assert (actor / "fsdp_config.json").exists()
    AutoTokenizer.from_pretrained(actor / "huggingface")
    for row, recomputed, temperature in zip(
        rows.to_pylist(), effects["logprobs"].to_pylist(), [1.0, 0.5, 1.0], strict=True
    ):
        expected = logprobs_by_transformers(actor / "huggingface", row, temperature)
        assert recomputed == pytest.approx(expected, abs=1e-5)


def test_published_weights_are_those_of_the_policy(ranks: Ranks, tmp_path: Path) -> None:
    steps(ranks, 2, 1)
    num_bytes, probe = ranks.run(ranks.groups[2].write_weights(tmp_path / "version_1"))
    assert probe is None
    assert num_bytes == sum(file.stat().st_size for file in (tmp_path / "version_1").glob("*.safetensors"))
    _, effects = ranks.run(ranks.groups[2].train_step(batch(num_rows=2, seed=6)))
    row = batch(num_rows=2, seed=6).to_pylist()[0]
    expected = logprobs_by_transformers(tmp_path / "version_1", row)
    assert effects["logprobs"].to_pylist()[0] == pytest.approx(expected, abs=1e-5)


def test_a_smaller_version_is_written_over_a_larger_one(ranks: Ranks, tmp_path: Path) -> None:
    steps(ranks, 2, 1)
    ranks.run(ranks.groups[2].write_weights(tmp_path / "version_1", dtype="float32"))
    inode = (tmp_path / "version_1" / "model.safetensors").stat().st_ino
    keep_spare(tmp_path / "version_1")
    num_bytes, _ = ranks.run(ranks.groups[2].write_weights(tmp_path / "version_2", dtype="bfloat16"))
    ranks.run(ranks.groups[2].write_weights(tmp_path / "new", dtype="bfloat16"))
    file = tmp_path / "version_2" / "model.safetensors"
    assert file.stat().st_ino == inode and file.stat().st_size == num_bytes
    assert file.read_bytes() == (tmp_path / "new" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_write_their_parts_of_one_file_in_the_engines_number_format(
    ranks: Ranks, tmp_path: Path, dtype: torch.dtype
) -> None:
    """Beside what transformers writes."""
    steps(ranks, 2, 1)
    ranks.run(ranks.groups[2].save(tmp_path / "global_step_1", {"step": 1}, with_huggingface=True))
    name = str(dtype).removeprefix("torch.")
    ranks.run(ranks.groups[2].write_weights(tmp_path / "version_1", dtype=name))
    expected = load_file(tmp_path / "global_step_1" / "actor" / "huggingface" / "model.safetensors")
    with safe_open(tmp_path / "version_1" / "model.safetensors", framework="pt") as file:
        found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    # which is the embedding
    assert found.keys() == expected.keys() - {"lm_head.weight"}
    for key, tensor in found.items():
        assert torch.equal(tensor, expected[key].to(dtype) if tensor.ndim > 1 else expected[key]), key
        assert tensor.data_ptr() % 64 == 0


def test_supervised_rows_need_no_logprobs_and_the_loss_is_the_mean_negative_logprob(ranks: Ranks) -> None:
    metrics, effects = ranks.run(ranks.begin(1, "sft").train_step(batch(sampled=False)))
    tokens = [value for row in effects["logprobs"].to_pylist() for value in row]
    assert metrics["loss"] == pytest.approx(-sum(tokens) / len(tokens), rel=1e-5)
    assert metrics["num_tokens"] == len(tokens)
    assert effects["ref_logprobs"].null_count == effects.num_rows
    shares = effects["loss_share"].to_pylist()
    assert sum(shares) == pytest.approx(metrics["loss"], rel=1e-5)
    first = effects["logprobs"].to_pylist()[0]
    assert shares[0] == pytest.approx(-sum(first) / len(tokens), rel=1e-5)


@pytest.mark.parametrize("algorithm", ["sft", "raft", "dpo"])
def test_a_supervised_loss_is_that_of_temperature_one(ranks: Ranks, algorithm: str) -> None:
    rows = {"num_rows": 6, "temperature": 0.7}
    as_sampled, effects = ranks.run(ranks.begin(1, algorithm).train_step(batch(**rows)))
    as_written, expected = ranks.run(ranks.begin(1, algorithm).train_step(batch(num_rows=6, sampled=False)))
    assert not [name for name in as_sampled if "logprob_diff" in name]
    for name in ("loss", "grad_norm"):
        assert as_sampled[name] == as_written[name], name
    assert effects["logprobs"] == expected["logprobs"]


def test_micro_batches_by_rows_take_the_step_of_micro_batches_by_tokens(ranks: Ranks) -> None:
    by_tokens, _ = ranks.run(ranks.begin(1).train_step(batch()))
    by_rows, _ = ranks.run(ranks.begin(1, rows=5).train_step(batch()))
    for name in ("loss", "grad_norm", "num_tokens"):
        assert by_rows[name] == pytest.approx(by_tokens[name], rel=2e-4, abs=1e-6), name


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_sampled_logprob_that_is_no_number_counts_as_on_policy_and_is_counted(
    ranks: Ranks, bad: float
) -> None:
    lists = batch(seed=3)["logprobs"].to_pylist()
    masks = batch(seed=3)["action_mask"].to_pylist()
    lists[0][0], lists[1][0], masks[1][0] = bad, bad, False
    rows = batch(seed=3, logprobs=lists, action_mask=masks)
    metrics, effects = ranks.run(ranks.begin(1).train_step(rows))
    assert metrics["nonfinite_logprobs"] == 1  # the other one is not trained
    assert metrics["update_skipped"] == 0
    assert np.isfinite(list(metrics.values())).all(), metrics
    own = effects["logprobs"].to_pylist()[0]
    ratios = [1.0, *(float(np.exp(logprob + 2.0)) for logprob in own[1:])]
    assert effects["importance_weight"].to_pylist()[0] == pytest.approx(float(np.mean(ratios)), rel=1e-4)


def test_a_gradient_that_is_no_number_changes_nothing_and_is_counted(ranks: Ranks) -> None:
    group = ranks.begin(2)
    before, _ = ranks.run(group.train_step(batch(seed=1)))
    assert before["update_skipped"] == 0
    expected = loss_of(ranks, 2, 7)
    group = ranks.begin(2)
    ranks.run(group.train_step(batch(seed=1)))
    broken, _ = ranks.run(group.train_step(batch(seed=2, advantage=[float("inf")] * 12)))
    assert broken["update_skipped"] == 1
    assert loss_of(ranks, 2, 7) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncated_importance_weights_correct_recomputed_logprobs(ranks: Ranks, level: str) -> None:
    """−A w ∇log π with w = min(π/π_sampled, C): the loss of a row is −A times the
    mean weight of its tokens.
    """
    sampled = [
        [-5.0, -7.0, -4.0][: len(row)] + [-5.5] * max(0, len(row) - 3)
        for row in batch()["logprobs"].to_pylist()
    ]
    correction = {"rollout_is": level, "rollout_is_threshold": 1.5}
    group = ranks.begin(1, bypass_old_logprobs=False, rollout_correction=correction)
    metrics, effects = ranks.run(group.train_step(batch(logprobs=sampled)))
    num_tokens = sum(map(len, sampled))
    advantages = batch()["advantage"].to_pylist()
    weights = 0.0
    for own, old, advantage, share in zip(
        effects["logprobs"].to_pylist(), sampled, advantages, effects["loss_share"].to_pylist(), strict=True
    ):
        log_ratio = np.array(own) - np.array(old)
        if level == "sequence":
            log_ratio = np.full(len(own), log_ratio.sum())
        row = np.minimum(np.exp(log_ratio), 1.5)
        weights += row.sum()
        assert share == pytest.approx(-advantage * row.sum() / num_tokens, rel=1e-4, abs=1e-7)
    assert metrics["rollout_correction_weight"] == pytest.approx(weights / num_tokens, rel=1e-4)
    assert metrics["importance_weight"] == pytest.approx(1.0)


def test_a_rank_without_rows_keeps_the_others_company(ranks: Ranks) -> None:
    metrics, effects = ranks.run(ranks.begin(2, "sft").train_step(batch(num_rows=1, sampled=False)))
    alone, _ = ranks.run(ranks.begin(1, "sft").train_step(batch(num_rows=1, sampled=False)))
    assert effects.num_rows == 1
    assert metrics["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)


def test_dpo_prefers_the_chosen_rows_after_a_few_steps(ranks: Ranks) -> None:
    group = ranks.begin(2, "dpo")
    metrics = [ranks.run(group.train_step(batch(num_rows=6, sampled=False)))[0] for _ in range(4)]
    # before the first update the policy is the reference: -log(sigmoid(0)) = log 2
    assert metrics[0]["loss"] == pytest.approx(0.693147, abs=1e-4)
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert metrics[-1]["accuracy"] == pytest.approx(1.0)


def test_the_reference_is_the_policy_that_the_stage_began_with(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(ranks.begin(2, "sft").train_step(batch(sampled=False)))
    before = tmp_path / "global_step_1"
    ranks.run(ranks.groups[2].save(before, {"step": 1}, with_huggingface=False))
    first_kl, effects = {}, {}
    for name, checkpoint in (("stage", before), ("model", None)):
        group = ranks.begin(1, "grpo", kl_loss_fn="k2", reference_checkpoint=checkpoint)
        ranks.run(group.load(before, with_optimizer=False))
        metrics, effects[name] = ranks.run(group.train_step(batch()))
        first_kl[name] = metrics["kl"]
    assert first_kl["stage"] == 0.0
    assert first_kl["model"] > 1e-4
    # each row's log-probs by the reference stand beside those of the policy
    assert effects["stage"]["ref_logprobs"] == effects["stage"]["logprobs"]
    apart = effects["model"].select(["logprobs", "ref_logprobs"]).to_pylist()
    gaps = [x - y for row in apart for x, y in zip(row["logprobs"], row["ref_logprobs"], strict=True)]
    assert sum(gap**2 for gap in gaps) / 2 / len(gaps) == pytest.approx(first_kl["model"], rel=1e-3)


@pytest.mark.slow
def test_rows_without_an_advantage_are_no_zeros_to_a_policy_gradient(ranks: Ranks, tiny_model: Path) -> None:
    group = start_trainer(world_size=1, num_gpus=0)
    ranks.run(group.load_model(str(tiny_model)))
    ranks.run(group.start_stage(ranks.spec("grpo"), reference_path=str(tiny_model)))
    with pytest.raises(
        TrainerError, match=r"1 of 12 rows of the batch have no advantage, by which 'grpo' trains"
    ):
        ranks.run(group.train_step(batch(advantage=[None, *[1.0] * 11])))


@pytest.mark.slow
def test_a_rank_without_its_reference_says_what_is_missing(
    ranks: Ranks, tiny_model: Path, tmp_path: Path
) -> None:
    group = start_trainer(world_size=1, num_gpus=0)
    ranks.run(group.load_model(str(tiny_model)))
    spec = ranks.spec("grpo", kl_loss_fn="k2", reference_checkpoint=tmp_path / "global_step_1")
    with pytest.raises(
        TrainerError, match=r"global_step_1 is missing, and with it the policy that this stage"
    ):
        ranks.run(group.start_stage(spec, reference_path=str(tiny_model)))


@pytest.mark.slow
def test_a_rank_that_fails_takes_the_others_with_it_and_says_why(
    ranks: Ranks, tiny_model: Path, tmp_path: Path
) -> None:
    group = start_trainer(world_size=2, num_gpus=0)
    ranks.run(group.load_model(str(tiny_model)))
    (tmp_path / "actor").mkdir()
    for _ in range(2):
        with pytest.raises(
            TrainerError, match=r"a rank of the trainer failed in load: .*fsdp_config\.json cannot be read"
        ):
            ranks.run(group.load(tmp_path, with_optimizer=False))
    for worker in group.workers:
        with pytest.raises(RayActorError, match=r"killed by `ray\.kill`"):
            ray.get(worker.call.remote("load"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_is_the_same_after_log_probs_of_a_probe(
    ranks: Ranks, tmp_path: Path, world_size: int
) -> None:
    group = ranks.begin(world_size)
    ranks.run(group.train_step(batch(seed=0)))
    ranks.run(group.save(tmp_path / "before", {"step": 1}, with_huggingface=False))
    ranks.run(group.write_weights(tmp_path / "weights", sequences=((5, 6, 7),)))
    ranks.run(group.save(tmp_path / "after", {"step": 1}, with_huggingface=False))
    before, after = (
        {file.name: file.read_bytes() for file in (tmp_path / name / "actor").glob("*.safetensors")}
        for name in ("before", "after")
    )
    assert before == after and len(before) == 3 * world_size
