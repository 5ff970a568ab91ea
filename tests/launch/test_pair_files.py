"""The pairs of pipeline files that ship, and the documents' own, run as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SHARED
from tests.launch.conftest import rows_of
from trinity_data.query.audit import audit

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SEEDS = SHARED / "seeds" / "configs"
# this machine has no GPU, and the engine answers from a script
HERE = [
    "cluster.gpu_per_node=0",
    "explorer.rollout_model.engine_type=fake",
    "explorer.rollout_model.engine_num=1",
]


def test_one_script_starts_the_pair(run_environment: dict[str, str], tmp_path: Path) -> None:
    own = {"TRINITY_CHECKPOINT_ROOT_DIR": str(tmp_path), "TRINITY_RUN_NAME": "pair"}
    own["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    small = ["buffer.total_steps=3", "buffer.batch_size=8", "buffer.train_batch_size=64"]
    command = ["bash", str(ROOT / "pipelines" / "async" / "run.sh"), *HERE, *small]
    done = subprocess.run(
        command, env=run_environment | own, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    job = tmp_path / "async" / "pair"
    assert rows_of(job, "select count(*) as n from steps") == [{"n": 3}] and audit(job / "store").ok


@pytest.mark.skipif(not SEEDS.is_dir(), reason="the documents are not beside the repository")
@pytest.mark.parametrize(
    "explorers", [["async_explorer.yaml"], ["async_explorer.yaml", "async_explorer_new.yaml"]]
)
def test_the_files_of_the_documents_run(
    run_environment: dict[str, str], taskset: Path, tmp_path: Path, explorers: list[str]
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    lines = (taskset / "train.jsonl").read_text().splitlines(keepends=True)
    (small / "train.jsonl").write_text("".join(lines[:128]))
    own = {"TRINITY_CHECKPOINT_ROOT_DIR": str(tmp_path), "TRINITY_TASKSET_PATH": str(small)}
    command = [sys.executable, "-m", "trinity_data.cli.main", "run"]
    processes = [
        subprocess.Popen(
            [*command, str(SEEDS / name), *HERE],
            env=run_environment | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in ("async_trainer.yaml", *explorers)
    ]
    for process in processes:
        output = process.communicate(timeout=400)[0]
        assert process.returncode == 0, output
    job = tmp_path / "async" / "gsm8k"
    # 128 tasks of 8 rollouts, 64 tasks a step
    counted = rows_of(job, "select count(*) as n, sum(num_experiences) as rows from steps")
    assert counted == [{"n": 2, "rows": 1024}] and audit(job / "store").ok
    tasks = rows_of(job, "select count(*) as n, count(distinct task_id) as tasks from groups")
    assert tasks == [{"n": 128, "tasks": 128}]
