"""A run on several nodes of a cluster that loses one of them goes on with another."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.conftest import PAIR, RunPipeline, rows_of
from tests.launch.test_pair import OF_THE_EVALUATIONS, OF_THE_ROWS, OF_THE_STEPS
from trinity_data.query.audit import audit

pytestmark = pytest.mark.slow
CLUSTER = Path(__file__).parents[2] / "pipelines" / "cluster.yaml"


def run_on_nodes(
    root: Path, job: Path, file: Path, lost: str, environment: dict[str, str], *overrides: str
) -> dict[str, Any]:
    """The run at `job`, which loses a node of processes of the class `lost`."""
    command = [sys.executable, "-m", "tests.launch.run_on_nodes", str(job), str(file), lost, *overrides]
    own = {"TRINITY_CHECKPOINT_ROOT_DIR": str(root), "TRINITY_RUN_NAME": job.name}
    done = subprocess.run(
        command, env=environment | own, capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcome: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert outcome["code"] == 0, outcome["output"]
    return outcome


def shards(job: Path, step: int) -> list[str]:
    files = sorted((job / f"global_step_{step}" / "actor").glob("*_world_size_2_rank_?.safetensors"))
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files if "extra" not in file.name]


def test_ranks_on_a_node_that_is_lost_come_back_elsewhere_and_the_rows_are_those_of_one_machine(
    run_pipeline: RunPipeline, run_environment: dict[str, str], tmp_path: Path
) -> None:
    overrides = ("buffer.total_steps=6", "trainer.world_size=2")
    job = tmp_path / "tests" / "nodes"
    run_on_nodes(tmp_path, job, PAIR, "WorkerActor", run_environment, *overrides)
    whole = run_pipeline(PAIR, tmp_path, "whole", *overrides)
    for query in (OF_THE_ROWS, OF_THE_STEPS, OF_THE_EVALUATIONS):
        assert rows_of(job, query) == rows_of(whole, query)
    assert shards(job, 6) == shards(whole, 6) and len(shards(job, 6)) == 4
    assert audit(job / "store").ok
    kinds = [row["kind"] for row in rows_of(job, "select kind from events where kind like 'trainer_%'")]
    assert kinds == ["trainer_died", "trainer_restarted"]


def test_engines_take_turns_on_the_nodes_and_one_whose_node_is_lost_runs_on_another(
    run_environment: dict[str, str], tmp_path: Path
) -> None:
    job = tmp_path / "cluster" / "nodes"
    environment = run_environment | {"TRINITY_TOTAL_STEPS": "6"}
    overrides = ("explorer.rollout_model.engine_type=transformers", "monitor.monitor_type=none")
    outcome = run_on_nodes(tmp_path, job, CLUSTER, "EngineActor", environment, *overrides)
    before = outcome["before"]
    assert len(set(before["EngineActor"])) == 2 and len(set(before["WorkerActor"])) == 1
    assert not set(before["WorkerActor"]) & set(before["EngineActor"])
    kinds = [row["kind"] for row in rows_of(job, "select kind from events where kind like 'engine_%'")]
    assert kinds == ["engine_died", "engine_restarted"]
    assert audit(job / "store").ok
