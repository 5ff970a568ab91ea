"""What one stage hands to the next, and what it knows of itself before its first step."""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from trinity_data.store.sql import open_sql

FILE = Path(__file__).with_name("fake.yaml")
ROWS, BATCH, EPOCHS = 12, 8, 4


def three_stages() -> dict[str, Any]:
    """A warm-up on two ranks and GRPO with a KL, both by epochs and on a schedule,
    then GRPO with two engines.

    No checkpoint has a Hugging Face folder.
    """
    file: dict[str, Any] = yaml.safe_load(FILE.read_text())
    file["monitor"] = {"monitor_type": "tensorboard", "enable_ray_timeline": True}
    file["trainer"] = {"save_hf_checkpoint": "never"}
    file["explorer"] |= {"eval_interval": None, "eval_on_startup": False, "eval_at_end": False}
    file["buffer"]["explorer_input"]["eval_tasksets"] = []
    warmup, grpo = file["stages"]
    schedule = {"lr": 1e-3, "lr_scheduler_type": "cosine", "lr_warmup_steps_ratio": 0.34, "min_lr_ratio": 0.0}
    warmup["algorithm"]["optimizer"] = schedule
    warmup["buffer"] |= {"total_steps": None, "total_epochs": EPOCHS}
    warmup["buffer"]["trainer_input"]["experience_buffer"]["limit"] = ROWS
    kl = {"kl_loss_fn": "k2", "kl_loss_fn_args": {"kl_coef": 0.1}}
    grpo |= {"algorithm": kl | {"optimizer": {"lr": 1e-3, "lr_warmup_steps_ratio": 1.0}}}
    grpo |= {"buffer": {"total_steps": None, "total_epochs": 1}}
    warmup["trainer"] = {"world_size": 2}
    grpo["synchronizer"] = {"sync_method": "checkpoint"}
    engines = {"explorer": {"rollout_model": {"engine_num": 2}}}
    file["stages"].append({"stage_name": "more", "buffer": {"total_steps": 1}} | engines)
    file["buffer"]["explorer_input"]["taskset"]["limit"] = ROWS
    file["explorer"]["refill_rounds"] = 0
    file["data_processor"] = {}
    return file


@pytest.fixture(scope="module")
def job(run_pipeline: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stages")
    (root / "stages.yaml").write_text(yaml.safe_dump(three_stages(), sort_keys=False))
    return run_pipeline(root / "stages.yaml", root, "stages")


def steps(job: Path, stage: str) -> list[dict[str, Any]]:
    with open_sql([job]) as session:
        found = session.query(f"SELECT * FROM steps WHERE stage = '{stage}' ORDER BY step")
        return found.to_pylist()


def test_the_kl_is_measured_from_where_the_stage_began_whatever_was_exported(job: Path) -> None:
    assert not list(job.glob("global_step_*/actor/huggingface"))
    first = steps(job, "grpo")[0]
    assert dict(first["metrics"])["kl"] == 0.0


def test_every_metric_of_a_step_is_on_the_page_of_metrics(job: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()
    documented = set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE))
    logged = {
        name
        for stage in ("warmup", "grpo", "more")
        for row in steps(job, stage)
        for name, _ in row["metrics"]
    }
    assert {"loss", "kl", "rows/number", "rollout/number", "time/explore"} <= logged
    assert logged <= documented


def test_the_yield_of_a_step_is_the_same_in_its_metrics_and_by_sql(job: Path) -> None:
    with open_sql([job]) as session:
        found = session.query("SELECT * FROM step_yield WHERE stage = 'grpo' ORDER BY step").to_pylist()
    metrics = [dict(row["metrics"]) for row in steps(job, "grpo")]
    for name in ("rollout_tokens", "dropped_tokens", "signal"):
        assert [each[f"yield/{name}"] for each in metrics] == pytest.approx([row[name] for row in found])
    assert [each.get("yield/tokens_per_signal") for each in metrics] == pytest.approx(
        [row["tokens_per_signal"] for row in found]
    )
    assert sum(row["rollout_tokens"] for row in found) > 0
    assert not any(name.startswith("yield/") for row in steps(job, "warmup") for name, _ in row["metrics"])


def test_a_schedule_has_its_effect_where_steps_are_counted_by_epochs(job: Path) -> None:
    rates = [row["learning_rate"] for row in steps(job, "warmup")]
    # 4 epochs of 12 rows in batches of 8 are 6 steps: 2 of warm-up, then half a cosine over 4
    cosine = [1e-3 * 0.5 * (1 + math.cos(math.pi * done / 4)) for done in range(4)]
    assert rates == pytest.approx([0.5e-3, 1e-3, *cosine])
    # 12 tasks by 8 are 2 steps, all of them warm-up
    assert [row["learning_rate"] for row in steps(job, "grpo")] == pytest.approx([0.5e-3, 1e-3])


def test_each_stage_has_ranks_and_a_way_of_the_weights_of_its_own(job: Path) -> None:
    folders = sorted(job.glob("global_step_*"))
    shards = {folder.name: len(list((folder / "actor").glob("model_world_size_*"))) for folder in folders}
    assert shards == {"global_step_6": 2, "global_step_8": 1, "global_step_9": 1}
    with open_sql([job]) as session:
        methods = session.query("SELECT DISTINCT stage, method FROM model_versions ORDER BY stage")
    assert methods.to_pylist() == [
        {"stage": "grpo", "method": "checkpoint"},
        {"stage": "more", "method": "memory"},
    ]


def test_each_stage_is_an_experiment_of_the_monitor_and_logs_each_step_once(job: Path) -> None:
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    shown = EventMultiplexer().AddRunsFromDirectory(str(job / "monitor" / "tensorboard")).Reload()
    logged = {name: [e.step for e in shown.Scalars(name, "actor/loss")] for name in shown.Runs()}
    assert logged == {"stages-warmup": [1, 2, 3, 4, 5, 6], "stages-grpo": [7, 8], "stages-more": [9]}


def test_the_timeline_has_what_the_workers_did_in_all_stages(job: Path) -> None:
    events = json.loads((job / "monitor" / "timeline.json").read_text())
    done = [event for event in events if event["cat"].startswith("task::WorkerActor.")]
    # two ranks of the first stage, and the one that the others share
    assert len({event["tid"] for event in done if event["name"] == "__init__"}) == 3
    assert all(event["dur"] > 0 for event in done)


def test_what_was_explored_is_in_the_folder_buffer(job: Path) -> None:
    with open_sql([job]) as session:
        found = session.query("SELECT experience_id, stage FROM experiences").to_pylist()
    lines = [
        json.loads(line) for line in (job / "buffer" / "experience_buffer.jsonl").read_text().splitlines()
    ]
    assert sorted(line["experience_id"] for line in lines) == sorted(row["experience_id"] for row in found)
    with closing(sqlite3.connect(job / "buffer" / "explorer_output.db")) as database:
        explored = database.execute("SELECT experience_id, stage FROM pipeline_input").fetchall()
    assert sorted(explored) == sorted(tuple(row.values()) for row in found if row["stage"] != "warmup")
    # every task of the task set, and one step of the last stage
    assert len(explored) == (ROWS + BATCH) * 4
