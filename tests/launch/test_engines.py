"""The whole loop on the tiny model with the engines that really sample: warm-up, exploring, training,
new weights, evaluation.

One run has a stage for each, so that it starts once.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from trinity_data.query.audit import audit
from trinity_data.store.sql import open_sql

FILE = Path(__file__).with_name("fake.yaml")
WARMUP_STEPS, STEPS = 2, 3
INSTALLED = [name for name in ("transformers", "vllm") if importlib.util.find_spec(name) is not None]


def one_stage_each() -> dict[str, Any]:
    file: dict[str, Any] = yaml.safe_load(FILE.read_text())
    warmup, _ = file["stages"]
    file["stages"] = [warmup] + [
        {"stage_name": name, "explorer": {"rollout_model": {"engine_type": name}}} for name in INSTALLED
    ]
    file["buffer"]["total_steps"] = STEPS
    # groups of untrained answers have no variance; without the filter there is something to train
    file["data_processor"]["experience_pipeline"]["operators"] = [{"name": "quality_score"}]
    return file


@pytest.fixture(scope="module")
def job(run_pipeline: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("engines")
    (root / "engines.yaml").write_text(yaml.safe_dump(one_stage_each(), sort_keys=False))
    return run_pipeline(root / "engines.yaml", root, "engines")


@pytest.mark.parametrize("engine_type", ["transformers", "vllm"])
def test_a_run_goes_from_tasks_to_new_weights_and_back_to_the_engine(engine_type: str, job: Path) -> None:
    if engine_type not in INSTALLED:
        pytest.skip(f"{engine_type} is not installed")
    assert audit(job / "store").ok
    of_stage = f"stage = '{engine_type}'"
    with open_sql([job]) as session:
        (tokens,) = session.query(
            "SELECT max(abs(logprob - recomputed_logprob)) AS apart, count(*) AS n, "
            f"count(DISTINCT model_version) AS versions FROM tokens WHERE {of_stage} AND recomputed_logprob "
            "IS NOT NULL"
        ).to_pylist()
        probes = session.query(
            "SELECT metrics['probe/logprob_diff_mean'] AS mean, metrics['probe/logprob_diff_max'] AS largest "
            f"FROM steps WHERE {of_stage}"
        ).to_pylist()
        evaluated = session.query(
            f"SELECT DISTINCT step, model_version FROM evals WHERE {of_stage} ORDER BY step"
        ).to_pylist()
        engines = session.query(
            f"SELECT DISTINCT engine, step - model_version AS age FROM rollouts WHERE {of_stage}"
        )
    # strictly on-policy: trained at the weights that sampled it, which are the newest each time
    assert tokens["n"] > 100 and tokens["versions"] == STEPS
    assert tokens["apart"] < 1e-4
    # every version was compared when the engine took it
    assert len(probes) == STEPS and all(0 <= row["mean"] <= row["largest"] < 1e-3 for row in probes)
    assert engines.to_pylist() == [{"engine": engine_type, "age": 1}]
    before = WARMUP_STEPS + STEPS * INSTALLED.index(engine_type)
    assert [(row["step"], row["model_version"]) for row in evaluated] == [
        (before, before),
        (before + STEPS, before + STEPS),
    ]


def test_each_role_and_engine_has_a_log_file(job: Path) -> None:
    logs = {file.name: file.read_text() for file in (job / "log").iterdir()}
    assert logs.keys() >= {
        "run.log",
        "trainer.log",
        "explorer.log",
        "explorer_engine_0.log",
        "trainer_rank_0.log",
    }
    if "vllm" in INSTALLED:
        # its own lines, of the engine's process
        assert re.search(r"INFO .* \[.*\.py:\d+\] .*KV cache", logs["explorer_engine_0.log"])
    assert "stage transformers, step 3: " in logs["trainer.log"]
    assert set(logs["trainer.log"].splitlines()) <= set(logs["run.log"].splitlines())
