"""The train loop: a real store, one real rank, batches from a list."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.trainer.bench import ROWS_A_STEP, Bench, put_rows, weights_digest
from trinity_data.config import StageConfig
from trinity_data.errors import TrainerError
from trinity_data.schema import experience_id, rows_to_table
from trinity_data.store.store import Store
from trinity_data.store.types import Commit, State
from trinity_data.weights import WeightFolders
from trinity_trainer.trainer import TRAIN_COLUMNS


def test_every_step_leaves_its_batch_its_numbers_and_its_versions(bench: Bench) -> None:
    put_rows(bench.store, 2)
    trainer = bench.trainer(publish_interval=2)
    trainer.reporter.explored(2, {"explorer/number": 20.0})
    bench.ranks.run(trainer.replay(0))
    bench.ranks.run(trainer.train(2))
    steps = bench.store.table("steps").to_pylist()
    assert [(row["step"], row["model_version"], row["num_experiences"],
     row["num_tokens"]) for row in steps] == [
        (1, 1, 4, 12), (2, 2, 4, 12),
    ]  # fmt: skip
    assert [row["reward"] for row in steps] == [1.5, 1.5]
    metrics = dict(steps[1]["metrics"])
    assert (metrics["truncated/mean"], metrics["response_length/mean"], metrics["explorer/number"]) == (
        0.25,
        3,
        20,
    )
    assert bench.metrics[2]["loss"] == steps[1]["loss"]
    documented = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()
    assert [name for name in metrics if f"`{name}`" not in documented] == ["explorer/number"]
    rows = bench.store.table("batches").to_pylist()
    assert [(row["step"], row["position"]) for row in rows] == [(s, i) for s in (1, 2) for i in range(4)]
    assert [row["experience_id"] for row in rows[:4]] == bench.store.batch(1)
    assert sum(row["loss_share"] for row in rows[:4]) == pytest.approx(steps[0]["loss"], rel=1e-5)
    assert [row["version"] for row in bench.store.table("model_versions").to_pylist()] == [0, 2]
    assert bench.store.counts()[State.TRAINED] == 8
    assert bench.synchronizer.finished == [0, 1, 2]
    assert (bench.status.step, bench.status.trained_version) == (2, 2)


def test_skipped_updates_are_events_and_stop_the_run_after_some(bench: Bench) -> None:
    bench.ranks.begin(1, "grpo")
    put_rows(bench.store, 4)
    outcomes: list[dict[str, object]] = [
        {"experience_id": experience_id(f"data/sft/{step:07d}/{i:05d}", 0), "stage": "sft", "step": step,
         "kept": True, "advantage": 1.0 if step == 2 else float("inf"), "reward": 1.0, "dropped_by": "",
         "group_id": f"{step}/{i}"}
        for step in (1, 2, 3, 4) for i in range(ROWS_A_STEP)
    ]  # fmt: skip
    bench.store.commit(Commit(tables={"outcomes": rows_to_table("outcomes", outcomes)}))
    trainer = bench.trainer(last=4, max_skipped_updates=2)
    with pytest.raises(TrainerError, match=r"2 update\(s\) in a row were skipped, the last one at step 4"):
        bench.ranks.run(trainer.train(4))
    steps = bench.store.table("steps").to_pylist()
    assert [dict(row["metrics"])["update_skipped"] for row in steps] == [1, 0, 1, 1]
    events = bench.store.table("events").to_pylist()
    assert [(row["step"], row["kind"]) for row in events] == [(step, "update_skipped") for step in (1, 3, 4)]


@pytest.mark.parametrize("last_step", [4, None])
@pytest.mark.parametrize("interval", [2, 3])
def test_the_last_checkpoint_has_a_huggingface_folder_wherever_the_stage_ends(
    bench: Bench, last_step: int | None, interval: int
) -> None:
    put_rows(bench.store, 4)
    trainer = bench.trainer(last=4, save_interval=interval, save_hf_checkpoint="last")
    bench.ranks.run(trainer.train(last_step))
    assert bench.checkpoints() == [f"global_step_{interval}", "global_step_4"]
    assert bench.huggingface() == ["global_step_4"]
    newest = bench.store.latest_checkpoint()
    assert newest is not None and (newest.step, newest.path) == (4, "global_step_4")
    assert (bench.job_dir / "latest_checkpointed_iteration.txt").read_text() == "4"


def test_old_checkpoints_of_the_stage_are_removed_and_those_before_it_stay(bench: Bench) -> None:
    (bench.job_dir / "global_step_0").mkdir()
    put_rows(bench.store, 3)
    bench.ranks.run(bench.trainer(save_interval=1, max_checkpoints_to_keep=2).train(3))
    assert bench.checkpoints() == ["global_step_0", "global_step_2", "global_step_3"]


def test_a_step_whose_rows_were_all_dropped_trains_nothing_and_goes_on(bench: Bench) -> None:
    put_rows(bench.store, 3, skip=2)
    bench.ranks.run(bench.trainer(last=3).train(None))
    steps = bench.store.table("steps").to_pylist()
    assert [(row["step"], row["num_experiences"]) for row in steps] == [(1, 4), (2, 0), (3, 4)]
    assert steps[1]["loss"] is None and not any("loss" in name for name, _ in steps[1]["metrics"])
    assert bench.synchronizer.finished == [1, 2, 3]
    (event,) = bench.store.table("events").to_pylist()
    assert (event["step"], event["kind"]) == (2, "nothing_trained")


def test_a_batch_whose_tokens_are_all_masked_out_makes_no_optimizer_step(bench: Bench) -> None:
    put_rows(bench.store, 1)
    bench.ranks.run(bench.trainer(last=1).train(1))
    before = weights_digest(bench, "before")
    put_rows(bench.store, 2, skip=1, masked=True)
    bench.ranks.run(bench.trainer(last=2).train_step(2, put := bench.store.pending("sft")))
    assert len(put) == 4 and weights_digest(bench, "after") == before
    step = bench.store.table("steps").to_pylist()[-1]
    assert (step["step"], step["num_rollouts"], step["num_tokens"], step["loss"]) == (2, 4, 0, None)
    (event,) = bench.store.table("events").to_pylist()
    assert event["message"].startswith("none of its 4 rollouts has a token to train")


def test_a_replay_ends_at_the_same_weights_and_writes_nothing_twice(bench: Bench) -> None:
    put_rows(bench.store, 5)
    bench.ranks.run(bench.trainer(save_interval=2).train(4))
    bench.store.form_batch("sft", 5, bench.store.pending("sft"))
    ids = bench.store.batch(5)
    assert ids is not None
    bench.ranks.run(bench.trainer().train_step(5, ids))
    whole = weights_digest(bench, "whole")

    # a new session: step 4 has a checkpoint, of step 5 only the batch was recorded before the crash
    bench.ranks.begin(1, "sft")
    bench.ranks.run(bench.ranks.groups[1].load(bench.job_dir / "global_step_4", with_optimizer=True))
    trainer = bench.trainer(publish_interval=1, explored=3)
    bench.ranks.run(trainer.replay(4))
    assert trainer.last_step == 5 and sorted(bench.synchronizer.published) == [4, 5]
    # version 3 cannot be made again from the checkpoint of step 4
    assert [bench.synchronizer.weights_of(version).version for version in (3, 4, 5)] == [4, 4, 5]
    assert weights_digest(bench, "replayed") == whole
    assert bench.store.table("steps")["step"].to_pylist() == [1, 2, 3, 4, 5]
    assert bench.store.table("batches").num_rows == 20


class Killed(BaseException):
    """In the place of a kill: nothing of the trainer goes on after it."""


@pytest.mark.parametrize("place", ["weights are written", "recorded", "named"])
def test_a_kill_beside_the_commit_of_a_step_with_its_version_loses_and_repeats_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    put_rows(bench.store, 3)
    trainer = bench.trainer(last=3, publish_interval=1, save_interval=1)
    killed_in = {
        "weights are written": (trainer.reporter, "trained"),
        "recorded": (bench.synchronizer.folders, "publish"),
        "named": (bench.synchronizer, "publish"),
    }[place]
    bench.ranks.run(trainer.replay(0))
    bench.ranks.run(trainer.train(1))

    def kill(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(*killed_in, kill)
        bench.ranks.run(trainer.train(3))
    folders = WeightFolders(bench.job_dir, "checkpoint")  # what the next session begins with
    is_recorded, is_named = place != "weights are written", place == "named"
    assert bench.store.batch(2) is not None and 2 not in bench.synchronizer.published
    assert bench.store.table("steps")["step"].to_pylist() == [1, 2][: 1 + is_recorded]
    assert bench.store.table("model_versions")["version"].to_pylist() == [0, 1, 2][: 2 + is_recorded]
    assert (folders.path(2).exists(), folders.draft(2).exists()) == (is_named, False)

    bench.ranks.run(bench.ranks.groups[1].load(bench.job_dir / "global_step_1", with_optimizer=True))
    trainer = bench.trainer(last=3, publish_interval=1, explored=2)
    bench.ranks.run(trainer.replay(1))
    assert sorted(bench.synchronizer.published) == [2]
    file = "model.safetensors"
    replayed = hashlib.sha256((folders.path(2) / file).read_bytes()).hexdigest()
    bench.ranks.run(trainer.train(None))
    steps = bench.store.table("steps")["step"].to_pylist()
    assert steps == [1, 2, 3] and sorted(bench.synchronizer.published) == [2, 3]
    assert bench.store.table("batches").num_rows == 3 * ROWS_A_STEP

    # as without a kill
    bench.ranks.begin(1, "sft")
    for step in (1, 2):
        ids = bench.store.batch(step)
        assert ids is not None
        bench.ranks.run(bench.trainer().train_step(step, ids))
    assert weights_digest(bench, "uninterrupted") == replayed


def stopped_in_step(bench: Bench, step: int, **settings: Any) -> None:
    """Trains, and is stopped as soon as the ranks are at work on `step`."""

    async def go() -> None:
        training = asyncio.create_task(bench.trainer(**settings).train(None))
        while bench.store.batch(step) is None:
            await asyncio.sleep(0.001)
        training.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await training

    bench.ranks.run(go())


def test_a_stopped_trainer_saves_the_step_under_way_so_that_nothing_is_trained_twice(
    bench: Bench,
) -> None:
    put_rows(bench.store, 5)
    stopped_in_step(bench, 3)
    assert bench.checkpoints() == ["global_step_3"]
    assert bench.store.table("steps")["step"].to_pylist() == [1, 2, 3]
    bench.ranks.begin(1, "sft")
    bench.ranks.run(bench.ranks.groups[1].load(bench.job_dir / "global_step_3", with_optimizer=True))
    trainer = bench.trainer(last=5)
    bench.ranks.run(trainer.replay(3))
    bench.ranks.run(trainer.train(None))
    resumed = weights_digest(bench, "resumed")

    # the same steps without a stop
    other = Bench(
        bench.ranks, bench.job_dir / "whole", Store.create_or_open(bench.job_dir / "whole" / "store")
    )
    bench.ranks.begin(1, "sft")
    put_rows(other.store, 5)
    bench.ranks.run(other.trainer(last=5).train(None))
    assert weights_digest(other, "whole") == resumed
    other.store.close()


def test_without_time_for_it_nothing_is_saved(bench: Bench) -> None:
    put_rows(bench.store, 2)
    stopped_in_step(bench, 2, stop_timeout=0)
    assert bench.checkpoints() == []


def test_a_replay_over_a_step_that_trained_nothing_ends_at_the_same_weights(bench: Bench) -> None:
    put_rows(bench.store, 3, skip=2)
    bench.ranks.run(bench.trainer(last=3, save_interval=1).train(3))
    whole = weights_digest(bench, "whole")
    bench.ranks.begin(1, "sft")
    bench.ranks.run(bench.ranks.groups[1].load(bench.job_dir / "global_step_1", with_optimizer=True))
    trainer = bench.trainer(publish_interval=1, explored=1)
    bench.ranks.run(trainer.replay(1))
    assert trainer.last_step == 3 and sorted(bench.synchronizer.published) == [1, 2, 3]
    assert weights_digest(bench, "replayed") == whole
    assert bench.store.table("steps")["step"].to_pylist() == [1, 2, 3]


def test_a_step_that_is_trained_again_is_trained_as_it_was_whatever_the_rate_is_now(bench: Bench) -> None:
    group = bench.ranks.groups[1]
    put_rows(bench.store, 4)
    bench.ranks.run(bench.trainer(save_interval=1).train(2))
    for step in (3, 4):
        bench.store.form_batch("sft", step, bench.store.pending("sft", through_step=step))
    ids = {step: bench.store.batch(step) or [] for step in (3, 4)}
    bench.ranks.run(bench.trainer().train_step(3, ids[3]))
    third = weights_digest(bench, "third")

    class Slower:
        """Up to step 3 another rate was in force."""

        current = "1"

        def stage_at(self, stage: str, step: int) -> StageConfig | None:
            return bench.stage() if step <= 3 else None

    trainer = bench.trainer(history=Slower(), rate=1e-2)
    bench.ranks.run(group.start_stage(trainer.specs.current, reference_path=str(bench.ranks.model)))
    bench.ranks.run(group.load(bench.job_dir / "global_step_2", with_optimizer=True))
    bench.ranks.run(trainer.train_step(3, ids[3]))
    assert weights_digest(bench, "again") == third
    bench.ranks.run(trainer.train_step(4, ids[4]))
    assert bench.metrics[4]["learning_rate"] == 1e-2


def put_sampled_rows(store: Store, num_steps: int) -> None:
    """Rows as an older policy sampled them, and what their advantages came to."""
    for step in range(1, num_steps + 1):
        rows: list[dict[str, object]] = []
        for i in range(ROWS_A_STEP):
            tokens = [5 + i, 9, *((31 * step + 17 * i + 7 * t) % 250 for t in range(3 + i))]
            rows.append(
                {"experience_id": experience_id(f"data/sft/{step:07d}/{i:05d}", 0), "stage": "sft",
                 "step": step, "position": i, "rollout": 0, "turn": 0, "token_ids": tokens,
                 "prompt_length": 2, "response_length": 3 + i,
                 "logprobs": [-5.4 - 0.2 * ((step + i + t) % 3) for t in range(3 + i)], "temperature": 0.8,
                 "action_mask": [t != 1 or i % 2 == 0 for t in range(3 + i)], "truncated": "", "error": "",
                 "reward": 1.0}
            )  # fmt: skip
        outcomes = [
            {"experience_id": row["experience_id"], "stage": "sft", "step": step, "kept": True,
             "dropped_by": "", "advantage": [1.0, -1.0, 0.5, -0.5][i], "reward": 1.0,
             "group_id": f"{step}/{i}"}
            for i, row in enumerate(rows)
        ]  # fmt: skip
        tables = {
            "experiences": rows_to_table("experiences", rows),
            "outcomes": rows_to_table("outcomes", outcomes),
        }
        states = [(str(row["experience_id"]), State.PENDING) for row in rows]
        store.commit(Commit(tables=tables, states=states))


def ppo_in_plain_torch(model: torch.nn.Module, rows: list[dict[str, Any]]) -> torch.Tensor:
    """GRPO's loss of a batch, one row after the other: token mean, clip 0.2, dual clip 3."""
    losses, num_tokens = [], sum(sum(row["action_mask"]) for row in rows)
    for row in rows:
        tokens, start = torch.tensor([row["token_ids"]]), row["prompt_length"] - 1
        logits = model(tokens).logits[0] / row["temperature"]
        logprobs = torch.log_softmax(logits, -1)[:-1].gather(-1, tokens[0, 1:, None])[start:, 0]
        ratio, advantage = (logprobs - torch.tensor(row["logprobs"])).exp(), row["advantage"]
        loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
        if advantage < 0:
            loss = loss.clamp(max=-3.0 * advantage)
        losses.append(loss[torch.tensor(row["action_mask"])].sum())
    return torch.stack(losses).sum() / num_tokens


def test_the_last_steps_of_a_run_again_in_plain_torch_end_at_its_weights(bench: Bench) -> None:
    bench.ranks.begin(1, "grpo")
    put_sampled_rows(bench.store, 4)
    bench.ranks.run(bench.trainer(last=4, save_interval=2).train(4))
    actors = {step: bench.job_dir / f"global_step_{step}" / "actor" for step in (2, 4)}
    found = load_file(actors[4] / "model_world_size_1_rank_0.safetensors")
    moments = load_file(actors[2] / "optim_world_size_1_rank_0.safetensors")

    model = AutoModelForCausalLM.from_pretrained(bench.ranks.model, dtype=torch.float32)
    model.load_state_dict(load_file(actors[2] / "model_world_size_1_rank_0.safetensors"), strict=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for name, parameter in model.named_parameters():
        step = moments[f"step.{name}"].reshape(())
        means = {key: moments[f"{key}.{name}"].clone() for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": step.clone(), **means}
    for step_number in (3, 4):
        ids = bench.store.batch(step_number)
        assert ids is not None
        loss = ppo_in_plain_torch(model, bench.store.read(ids, columns=TRAIN_COLUMNS).to_pylist())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert bench.metrics[step_number]["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
        assert bench.metrics[step_number]["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), found[name], rtol=0, atol=2e-6, msg=name)
