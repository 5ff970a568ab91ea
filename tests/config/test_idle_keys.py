"""Keys that a stage does not use are refused where a person would miss them,
and noted where they cannot hurt.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from trinity_data.config import RunConfig, load_pipeline_file
from trinity_data.errors import ConfigError

BOTH = """
project: tests
name: effects
algorithm: {algorithm_type: grpo}
model: {model_path: synthetic://qwen2-1m, max_prompt_tokens: 48, max_response_tokens: 16}
buffer:
  batch_size: 4
  default_workflow_type: math_workflow
  explorer_input:
    taskset: {path: synthetic://gsm8k}
"""
TRAIN = """
project: tests
name: effects
mode: train
algorithm: {algorithm_type: sft}
model: {model_path: synthetic://qwen2-1m, max_model_len: 64}
buffer:
  train_batch_size: 4
  trainer_input:
    experience_buffer: {path: synthetic://gsm8k}
"""
STAGES = """
explorer: {max_timeout: 5}
data_processor: {experience_pipeline: {operators: [{name: reward_std_filter}]}}
stages:
  - stage_name: warmup
    mode: train
    algorithm: {algorithm_type: sft}
    buffer:
      train_batch_size: 4
      trainer_input: {experience_buffer: {path: synthetic://gsm8k}}
  - stage_name: rft
"""
BUFFER = "buffer.trainer_input.experience_buffer"
TASKSET = "buffer.explorer_input.taskset"


def load(tmp_path: Path, text: str, *overrides: str) -> RunConfig:
    file = tmp_path / "pipeline.yaml"
    file.write_text(textwrap.dedent(text))
    return load_pipeline_file(file, overrides)


def notes(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    return [note.split(": ", 1)[1] for note in load(tmp_path, text, *overrides).notes]


@pytest.mark.parametrize("text", [BOTH, TRAIN])
def test_a_file_without_idle_keys_has_no_notes(tmp_path: Path, text: str) -> None:
    assert notes(tmp_path, text) == []


@pytest.mark.parametrize(
    "override",
    [
        f"{BUFFER}.split=test",
        f"{BUFFER}.subset_name=main",
        f"{BUFFER}.limit=5",
        f"{BUFFER}.query=select 1",
        f"{BUFFER}.format.prompt_key=question",
        "explorer.rollout_model={engine_type: transformers, tensor_parallel_size: 2}",
    ],
)
def test_what_an_exploring_stage_would_leave_undone_is_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, BOTH, override)
    assert "remove it" in str(caught.value)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        (
            "data_processor.task_pipeline.operators=[{name: prompt_length_filter}]",
            "data_processor.task_pipeline.operators",
        ),
        (
            "data_processor.experience_pipeline.operators=[{name: reward_filter}]",
            "data_processor.experience_pipeline.operators",
        ),
        (
            "data_processor.experience_pipeline.save_input=true",
            "data_processor.experience_pipeline.save_input",
        ),
        ("algorithm.advantage_fn=grpo", "algorithm.advantage_fn"),
        ("algorithm.advantage_fn_args={epsilon: 1}", "algorithm.advantage_fn_args"),
    ],
)
def test_what_a_training_stage_would_leave_undone_is_refused(tmp_path: Path, override: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf": {key}: has no effect with mode 'train'"):
        load(tmp_path, TRAIN, override)


def test_a_limit_of_rows_that_a_query_chooses_is_refused(tmp_path: Path) -> None:
    stored = f"{BUFFER}={{path: runs/old, query: select experience_id from experiences, limit: 5}}"
    with pytest.raises(ConfigError, match="limit: has no effect with storage_type 'store'"):
        load(tmp_path, TRAIN, "algorithm.algorithm_type=opmd", stored)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("explorer.max_timeout=5", "explorer.max_timeout"),
        ("explorer.rollout_model.engine_num=2", "explorer.rollout_model.engine_num"),
        ("synchronizer.sync_interval=2", "synchronizer.sync_interval"),
        ("buffer.batch_size=4", "buffer.batch_size"),
        (f"{TASKSET}={{path: synthetic://gsm8k}}", f"{TASKSET}.path"),
        ("algorithm.repeat_times=4", "algorithm.repeat_times"),
        ("model.top_p=0.5", "model.top_p"),
        (f"{BUFFER}.format.workflow_key=w", f"{BUFFER}.format.workflow_key"),
        (f"{BUFFER}.format.chosen_key=w", f"{BUFFER}.format.chosen_key"),
    ],
)
def test_what_a_training_stage_has_no_use_for_is_noted(tmp_path: Path, override: str, key: str) -> None:
    (note,) = notes(tmp_path, TRAIN, override)
    assert note.startswith(f"{key}: has no effect ")


@pytest.mark.parametrize(
    ("override", "note"),
    [
        ("explorer.eval_interval=5", "explorer.eval_interval: has no effect without buffer.explorer_input"),
        ("explorer.rollout_model.script=a.jsonl", "script: has no effect with engine_type 'auto'"),
        (
            "explorer.rollout_model={engine_type: transformers, enforce_eager: true}",
            "explorer.rollout_model.enforce_eager: has no effect with engine_type 'transformers'",
        ),
        (
            "explorer.rollout_model={engine_type: fake, gpu_memory_utilization: 0.5}",
            "explorer.rollout_model.gpu_memory_utilization: has no effect with engine_type 'fake'",
        ),
        (f"{TASKSET}.format.chosen_key=a", "format.chosen_key: has no effect in a task set"),
        ("trainer.max_token_len_per_gpu=63", "a longer sequence, of up to model.max_model_len = 64 tokens"),
        ("algorithm.optimizer.min_lr_ratio=0.1", "has no effect with lr_scheduler_type 'constant'"),
        (
            "algorithm.optimizer={lr_warmup_steps: 3, lr_warmup_steps_ratio: 0.1}",
            "lr_warmup_steps_ratio: has no effect: lr_warmup_steps, 3, takes precedence",
        ),
        (
            "explorer.dynamic_timeout={ratio: 4}",
            "explorer.dynamic_timeout.ratio: has no effect without dynamic_timeout.enable: true",
        ),
        (
            "explorer.over_rollout={wait_after_min: 4}",
            "explorer.over_rollout.wait_after_min: has no effect without over_rollout.ratio",
        ),
        (
            "explorer.over_rollout={ratio: 0.01}",
            "explorer.over_rollout.ratio: found 0.01; has no effect with buffer.batch_size",
        ),
        (
            "explorer.max_inflight_batches=2",
            "max_inflight_batches: has no effect with sync_interval 1 and sync_offset 0: a step waits",
        ),
        (
            "synchronizer={sync_interval: 2, explorer_sync_interval: 2}",
            "explorer_sync_interval: found 2; has no effect with sync_style 'fixed', in which",
        ),
        (
            "synchronizer={sync_style: dynamic_by_explorer, trainer_sync_interval: 2}",
            "trainer_sync_interval: has no effect with sync_style 'explorer_driven'",
        ),
        (
            "synchronizer={sync_style: dynamic_by_trainer, sync_offset: 2}",
            "sync_offset: has no effect with sync_style 'trainer_driven': sample_strategy_args.max_staleness",
        ),
        ("buffer={total_steps: 3, total_epochs: 2}", "total_epochs: has no effect: total_steps, 3"),
    ],
)
def test_what_cannot_hurt_is_noted_at_its_line(tmp_path: Path, override: str, note: str) -> None:
    if override.startswith("buffer="):
        found = notes(tmp_path, BOTH, "buffer.total_steps=3", "buffer.total_epochs=2")
    else:
        found = notes(tmp_path, BOTH, override)
    assert len(found) == 1 and note in found[0]


def test_a_key_above_the_stages_is_idle_only_where_no_stage_uses_it(tmp_path: Path) -> None:
    both = BOTH + STAGES
    assert notes(tmp_path, both) == []
    (note,) = notes(tmp_path, both, "stages.warmup.explorer={max_timeout: 9}")
    assert note.startswith("stages.warmup.explorer.max_timeout: has no effect with mode 'train'")
    with pytest.raises(ConfigError, match=r"stages\.warmup\.data_processor"):
        load(tmp_path, both, "stages.warmup.data_processor={experience_pipeline: {save_input: true}}")


def test_a_key_above_the_stages_that_no_stage_takes_over_is_noted(tmp_path: Path) -> None:
    text = (BOTH + STAGES).replace("{algorithm_type: grpo}", "{algorithm_type: opmd, repeat_times: 4}", 1)
    found = notes(tmp_path, text, "stages.rft.algorithm={algorithm_type: rloo}", "trainer.save_interval=5")
    assert found == [
        (
            "algorithm.algorithm_type: has no effect: every stage gives its own, "
            "or has another algorithm_type or buffer"
        ),
        (
            "algorithm.repeat_times: has no effect: every stage gives its own, "
            "or has another algorithm_type or buffer"
        ),
    ]


def test_a_value_that_no_stage_can_read_is_reported_of_all_of_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, BOTH + STAGES, "explorer.max_timeout=-1")
    assert str(caught.value).endswith("explorer.max_timeout: found -1; allowed: > 0")


def test_labels_may_be_the_same(tmp_path: Path) -> None:
    load(tmp_path, BOTH, f"{BUFFER}.name=taskset", "trainer.name=taskset")


def test_a_literal_takes_text_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "trainer.ulysses_sequence_parallel_size"
    assert load(tmp_path, BOTH, f"{key}=${{oc.env:SP_NUM,1}}").stages[0].trainer
    monkeypatch.setenv("SP_NUM", "2")
    with pytest.raises(ConfigError, match=f"{key}: found '2'; allowed: 1"):
        load(tmp_path, BOTH, f"{key}=${{oc.env:SP_NUM,1}}")


def test_an_interval_that_fixed_transfers_would_pass_over_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found 3; has no effect with sync_style 'fixed'"):
        load(tmp_path, BOTH, "synchronizer={sync_interval: 2, explorer_sync_interval: 3}")
