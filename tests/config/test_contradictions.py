"""What a pipeline file may say about the trainer's steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_data.config import load_pipeline_file
from trinity_data.errors import ConfigError

PIPELINES = Path(__file__).parents[2] / "pipelines"
BY_EPOCHS, DPO = PIPELINES / "gsm8k_qwen.yaml", PIPELINES / "dpo_from_buffer.yaml"
NO_OPERATORS = "data_processor.task_pipeline.operators=[]"


def diagnostic(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_pipeline_file(file, list(overrides))
    return str(caught.value)


@pytest.mark.parametrize(
    ("file", "overrides", "message"),
    [
        (
            BY_EPOCHS,
            ["algorithm.optimizer.lr_scheduler_type=cosine"],
            "algorithm.optimizer.lr_scheduler_type: found 'cosine' in a stage that explores by epochs, "
            "whose steps cannot "
            "be counted before, as task operators may drop tasks; write buffer.total_steps, "
            "or lr_scheduler_type: constant",
        ),
        (
            BY_EPOCHS,
            [NO_OPERATORS, "explorer.refill_rounds=1", "algorithm.optimizer.lr_warmup_steps_ratio=0.1"],
            "algorithm.optimizer.lr_warmup_steps_ratio: found 0.1 in a stage that explores by epochs, "
            "whose steps cannot be counted before, as refill_rounds takes more tasks; "
            "write buffer.total_steps, or lr_warmup_steps",
        ),
        (BY_EPOCHS, ["trainer.use_dynamic_bsz=false"], "trainer.micro_batch_size_per_gpu: missing; with"),
        (
            BY_EPOCHS,
            ["trainer.micro_batch_size_per_gpu=4"],
            "trainer.micro_batch_size_per_gpu: has no effect with use_dynamic_bsz true",
        ),
        (
            DPO,
            ["trainer.use_dynamic_bsz=false", "trainer.micro_batch_size_per_gpu=3"],
            "trainer.micro_batch_size_per_gpu: found 3 with 'dpo', which trains pairs; allowed: even numbers",
        ),
        (
            DPO,
            ["trainer.use_dynamic_bsz=false", "trainer.micro_batch_size_per_gpu=4"],
            "trainer.max_token_len_per_gpu: found 4096; has no effect with use_dynamic_bsz false",
        ),
        (BY_EPOCHS, ["trainer.ppo_micro_batch_size_per_gpu=4"], "write trainer.micro_batch_size_per_gpu"),
    ],
)
def test_what_would_have_no_effect_is_refused(file: Path, overrides: list[str], message: str) -> None:
    assert message in diagnostic(file, *overrides)


@pytest.mark.parametrize(
    ("file", "overrides"),
    [
        (BY_EPOCHS, ["algorithm.optimizer.lr_scheduler_type=cosine", "buffer.total_steps=9"]),
        (BY_EPOCHS, ["algorithm.optimizer.lr_scheduler_type=cosine", NO_OPERATORS]),
        (
            BY_EPOCHS,
            ["algorithm.optimizer.lr_warmup_steps=3", "algorithm.optimizer.lr_warmup_steps_ratio=0.1"],
        ),
        (BY_EPOCHS, ["trainer.use_dynamic_bsz=false", "trainer.micro_batch_size_per_gpu=3"]),
        # of stored rows the steps are counted before the first one
        (
            DPO,
            [
                "algorithm.optimizer.lr_scheduler_type=cosine",
                "buffer.total_steps=null",
                "buffer.total_epochs=2",
            ],
        ),
    ],
)
def test_what_has_its_effect_passes(file: Path, overrides: list[str]) -> None:
    load_pipeline_file(file, overrides)


def test_a_stage_that_only_trains_does_not_inherit_an_advantage(tmp_path: Path) -> None:
    text = BY_EPOCHS.read_text().replace(
        "algorithm_type: grpo", "algorithm_type: grpo\n  advantage_fn: rloo", 1
    )
    file = tmp_path / "two.yaml"
    stages = "\nstages:\n  - stage_name: again\n    mode: train\n    buffer:\n      trainer_input:\n"
    file.write_text(f"{text}{stages}        experience_buffer: {{path: copy.jsonl, storage_type: file}}\n")
    (stage,) = load_pipeline_file(file, ["data_processor=null"]).stages
    assert (stage.mode, stage.algorithm.advantage_fn) == ("train", None)
