"""pipelines/bench.yaml with a real engine on the checkpoints of a small run, one of which has shards only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.launch.conftest import RunPipeline, rows_of
from trinity_data.launch.checkpoints import Checkpoint

ROOT = Path(__file__).parents[2]
SETS = "buffer.explorer_input.eval_tasksets"
OVERRIDES = (
    "project=tests", "monitor.monitor_type=none", "explorer.rollout_model.engine_type=transformers",
    f"{SETS}.0.limit=6", f"{SETS}.1.limit=3", f"{SETS}.1.repeat_times=4", "model.max_response_tokens=16",
)  # fmt: skip


@pytest.fixture(scope="module")
def job(run_pipeline: RunPipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of fine-tuning, four of GRPO, and an evaluation of them by the same file."""
    root = tmp_path_factory.mktemp("bench")
    stages = [
        {"stage_name": "warmup", "mode": "train", "algorithm": {"algorithm_type": "sft"}, "buffer": {
            "train_batch_size": 8, "total_steps": 2, "trainer_input": {"experience_buffer": {
                "path": "${buffer.explorer_input.taskset.path}",
                "format": {"prompt_key": "question", "response_key": "answer"}}}}},
        {"stage_name": "grpo", "buffer": {"total_steps": 4}},
        {"stage_name": "held_out", "mode": "bench"},
    ]  # fmt: skip
    return run_pipeline(ROOT / "tests" / "launch" / "fake.yaml", root, "run", f"stages={json.dumps(stages)}")


@pytest.fixture(scope="module")
def bench(run_pipeline: RunPipeline, job: Path) -> Path:
    run_pipeline(ROOT / "pipelines" / "bench.yaml", job.parents[1], "run", *OVERRIDES)
    return job / "bench" / "bench"


def results(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "results.json").read_text())["results"]
    return found


def test_a_stage_of_mode_bench_evaluates_what_the_stages_before_it_have_trained(job: Path) -> None:
    stored = results(job / "bench" / "held_out")
    assert [each["step"] for each in stored] == [0, 2, 4, 6]
    # the run evaluates itself with the same engine, tasks and seeds
    run = rows_of(job, "select task_id, response_text from evals where step = 6 order by all")
    again = "select task_id, response_text from evals where step = 6 order by all"
    assert rows_of(job / "bench" / "held_out", again) == run


def test_checkpoints_with_shards_only_are_evaluated_too(job: Path, bench: Path) -> None:
    with_huggingface = [
        (job / f"global_step_{step}" / "actor" / "huggingface").exists() for step in (2, 4, 6)
    ]
    assert with_huggingface == [True, False, True]
    assert [(each["step"], each["taskset"], each["num_tasks"]) for each in results(bench)] == [
        (step, taskset, tasks) for step in (0, 2, 4, 6) for taskset, tasks in (("greedy", 6), ("sampled", 3))
    ]
    # nothing is left of what was converted
    assert {path.name for path in bench.iterdir() if path.is_dir()} == {"log", "store"}


def test_the_engine_answers_with_the_weights_of_each_checkpoint(bench: Path) -> None:
    rows = rows_of(
        bench,
        "select step, list(response_text order by task_id) as texts from evals "
        "where taskset = 'greedy' group by step",
    )
    assert len({tuple(row["texts"]) for row in rows}) == 4


def test_converted_shards_are_the_weights_that_the_trainer_wrote(
    job: Path, tiny_model: Path, tmp_path: Path
) -> None:
    from trinity_trainer.conversion import write_huggingface

    actor = Checkpoint(6, str(job / "global_step_6")).actor
    write_huggingface(actor, str(tiny_model), tmp_path / "converted")
    ours, written = (
        load_file(str(folder / "model.safetensors"))
        for folder in (tmp_path / "converted", actor / "huggingface")
    )
    assert ours.keys() == written.keys()
    assert all(ours[name].equal(written[name]) for name in written)


def test_the_run_and_its_evaluations_can_be_asked_together(job: Path, bench: Path) -> None:
    from trinity_data.store.sql import open_sql

    with open_sql([job, bench]) as session:
        rows = session.query(
            "select run, stage, count(distinct step) as steps from evals group by all order by all"
        ).to_pylist()
    assert rows == [
        {"run": "bench", "stage": "bench", "steps": 4},
        {"run": "run", "stage": "grpo", "steps": 3},
    ]
