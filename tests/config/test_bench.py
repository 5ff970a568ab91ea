"""Pipeline files of mode `bench`: what they need, what they may leave out, what has no effect in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.small_pipelines import EXPLORING
from trinity_data.config import RunConfig, load_pipeline_file
from trinity_data.errors import ConfigError

BENCH = """
project: tests
name: small
mode: bench
model: {model_path: synthetic://qwen2-1m, max_prompt_tokens: 48, max_response_tokens: 16}
buffer:
  default_workflow_type: math_workflow
  explorer_input:
    eval_tasksets: [{name: sums, path: synthetic://gsm8k}]
"""
SETS = "buffer.explorer_input.eval_tasksets=[{name: sums, path: synthetic://gsm8k}]"


def load(tmp_path: Path, text: str, *overrides: str) -> RunConfig:
    file = tmp_path / "pipeline.yaml"
    file.write_text(text)
    return load_pipeline_file(file, overrides)


def test_an_evaluation_needs_a_model_and_task_sets_and_no_algorithm(tmp_path: Path) -> None:
    config = load(tmp_path, BENCH)
    (stage,) = config.stages
    assert (stage.stage_name, stage.evaluates_only, stage.trains, stage.explores) == (
        "bench",
        True,
        False,
        False,
    )
    assert config.notes == ()
    with pytest.raises(ConfigError, match=r"eval_tasksets: missing; mode 'bench' evaluates a model on them"):
        load(tmp_path, BENCH, "buffer.explorer_input.eval_tasksets=[]")


def test_a_file_that_trains_evaluates_with_another_mode_and_names_the_keys_that_are_idle_then(
    tmp_path: Path,
) -> None:
    config = load(tmp_path, EXPLORING, "mode=bench", SETS)
    assert config.stages[0].stage_name == "bench"
    keys = [note.split(": ")[1] for note in config.notes]
    taskset = ("format.prompt_key", "format.response_key", "path")
    assert sorted(keys) == [
        "buffer.batch_size",
        *(f"buffer.explorer_input.taskset.{name}" for name in taskset),
        "buffer.total_steps",
    ]


@pytest.mark.parametrize(
    "override",
    [
        "algorithm={algorithm_type: grpo, optimizer: {lr: 1.0e-3}}",
        "trainer.save_interval=3",
        "synchronizer.sync_interval=2",
        "explorer.eval_interval=5",
        "explorer.runner_per_model=5",
        "data_processor.experience_pipeline.operators=[{name: reward_std_filter}]",
        "default_contracts=false",
    ],
)
def test_what_an_evaluation_does_not_use_is_noted(tmp_path: Path, override: str) -> None:
    assert load(tmp_path, BENCH, override).notes


def test_the_newest_checkpoint_alone_is_a_choice_of_mode_bench(tmp_path: Path) -> None:
    key = "explorer.bench_on_latest_checkpoint"
    assert load(tmp_path, BENCH, f"{key}=true").notes == ()
    (note,) = load(tmp_path, EXPLORING, f"{key}=true").notes
    assert f"{key}: has no effect with mode 'both', only with 'bench'" in note


def test_evaluations_come_after_what_they_evaluate(tmp_path: Path) -> None:
    first, last = "{stage_name: rft}", "{stage_name: held_out, mode: bench}"
    stages = load(tmp_path, EXPLORING, SETS, f"stages=[{first}, {last}]").stages
    assert [stage.evaluates_only for stage in stages] == [False, True]
    with pytest.raises(ConfigError, match="found 'bench' before 'rft', whose checkpoints it would not see"):
        load(tmp_path, EXPLORING, SETS, f"stages=[{last}, {first}]")
