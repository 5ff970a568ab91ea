"""Explorer and trainer as two commands make what one process makes, and each may end and come back."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.conftest import RunPipeline, rows_of
from trinity_data.query.audit import audit

FILE = Path(__file__).with_name("pair.yaml")
STEPS = 4
OF_THE_ROWS = (
    "select experience_id, step, task_id, state, reward, shaped_reward, model_version, response_text from "
)
OF_THE_ROWS += "experiences order by experience_id"
OF_THE_STEPS = "select step, num_experiences, loss, grad_norm from steps order by step"

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(run_environment: dict[str, str], tmp_path: Path) -> Start:
    """`start(mode, *overrides)`: one process of the pair, whose output is one text."""

    def start(mode: str, *overrides: str) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "trinity_data.cli.main",
            "run",
            str(FILE),
            f"mode={mode}",
            *overrides,
        ]
        own = {"TRINITY_CHECKPOINT_ROOT_DIR": str(tmp_path), "TRINITY_RUN_NAME": "pair"}
        output = subprocess.PIPE, subprocess.STDOUT
        return subprocess.Popen(
            command, env=run_environment | own, stdout=output[0], stderr=output[1], text=True
        )

    return start


def ends(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output


def weights_of(job: Path) -> str:
    file = job / f"global_step_{STEPS}" / "actor" / "model_world_size_1_rank_0.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_two_commands_make_what_one_makes(start: Start, run_pipeline: RunPipeline, tmp_path: Path) -> None:
    trainer = start("train")
    explorer = start("explore")
    ends(explorer)
    ends(trainer)
    pair, whole = tmp_path / "tests" / "pair", run_pipeline(FILE, tmp_path, "whole")
    assert rows_of(pair, OF_THE_ROWS) == rows_of(whole, OF_THE_ROWS)
    assert rows_of(pair, OF_THE_STEPS) == rows_of(whole, OF_THE_STEPS)
    evaluations = "select step, model_version, taskset, task_id, reward from evals order by all"
    assert rows_of(pair, evaluations) == rows_of(whole, evaluations)
    assert weights_of(pair) == weights_of(whole)
    assert audit(pair / "store").ok
