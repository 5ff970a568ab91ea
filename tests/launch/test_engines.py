"""The whole loop on the tiny model with the engines that really sample: warm-up, exploring, training, new weights, evaluation."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trinity_data.store.audit import audit
from trinity_data.store.sql import open_sql

FILE = Path(__file__).with_name("fake.yaml")


@pytest.mark.parametrize("engine_type", ["transformers", "vllm"])
def test_a_run_goes_from_tasks_to_new_weights_and_back_to_the_engine(
    engine_type: str, taskset: Path, tiny_model: Path, tmp_path: Path
) -> None:
    if engine_type == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    environment = os.environ | {
        "TRINITY_CHECKPOINT_ROOT_DIR": str(tmp_path),
        "TRINITY_TASKSET_PATH": str(taskset),
        "TRINITY_MODEL_PATH": str(tiny_model),
        "TRINITY_RUN_NAME": engine_type,
    }
    # groups of untrained answers have no variance; without the filter there is something to train
    overrides = [
        f"explorer.rollout_model.engine_type={engine_type}",
        "buffer.total_steps=3",
        "data_processor.experience_pipeline.operators=[{name: quality_score}]",
    ]
    command = [sys.executable, "-m", "trinity_data.cli.main", "run", str(FILE), *overrides]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "tests" / engine_type
    assert audit(run / "store").ok
    with open_sql([run]) as session:
        (tokens,) = session.query(
            "SELECT max(abs(logprob - recomputed_logprob)) AS apart, count(*) AS n, count(DISTINCT model_version) AS versions "
            "FROM tokens WHERE stage = 'grpo' AND recomputed_logprob IS NOT NULL"
        ).to_pylist()
        probes = session.query(
            "SELECT metrics['probe/logprob_diff_mean'] AS mean, metrics['probe/logprob_diff_max'] AS largest "
            "FROM steps WHERE stage = 'grpo'"
        ).to_pylist()
        evaluated = session.query("SELECT DISTINCT step, model_version FROM evals ORDER BY step").to_pylist()
        engines = session.query(
            "SELECT DISTINCT engine, step - model_version AS age FROM rollouts WHERE stage = 'grpo'"
        )
    # strictly on-policy: trained at the weights that sampled it, which are the newest each time
    assert tokens["n"] > 100 and tokens["versions"] == 3
    assert tokens["apart"] < 1e-4
    # every version was compared when the engine took it
    assert len(probes) == 3 and all(0 <= row["mean"] <= row["largest"] < 1e-3 for row in probes)
    assert engines.to_pylist() == [{"engine": engine_type, "age": 1}]
    assert [(row["step"], row["model_version"]) for row in evaluated] == [(2, 2), (5, 5)]
