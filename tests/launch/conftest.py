"""A whole run as a process, on the session's model and tasks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import SHARED

RunPipeline = Callable[..., Path]


@pytest.fixture(scope="session")
def questions(taskset: Path) -> Path:
    """GSM8K's own text where it lies beside the project, else the synthetic set."""
    folder = SHARED / "gsm8k"
    return folder if folder.exists() else taskset


@pytest.fixture(scope="session")
def run_environment(taskset: Path, tiny_model: Path) -> dict[str, str]:
    """For a start of fake.yaml; root and name of the run are to be added."""
    return os.environ | {
        "TRINITY_TASKSET_PATH": str(taskset),
        "TRINITY_MODEL_PATH": str(tiny_model),
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="session")
def run_pipeline(run_environment: dict[str, str]) -> RunPipeline:
    """`run_pipeline(file, root, name, *overrides)`: runs it to its end; returns the job folder."""

    def run_pipeline(file: Path, root: Path, name: str, *overrides: str) -> Path:
        own = {"TRINITY_CHECKPOINT_ROOT_DIR": str(root), "TRINITY_RUN_NAME": name}
        command = [sys.executable, "-m", "trinity_data.cli.main", "run", str(file), *overrides]
        done = subprocess.run(
            command, env=run_environment | own, capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return root / "tests" / name

    return run_pipeline
