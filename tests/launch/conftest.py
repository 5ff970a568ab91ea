"""A whole run as a process, on the session's model and tasks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.conftest import SHARED
from trinity_data.store.sql import open_sql

RunPipeline = Callable[..., Path]
StartPart = Callable[..., subprocess.Popen[str]]
PAIR = Path(__file__).with_name("pair.yaml")
EMPTY = MappingProxyType[str, str]({})
Solutions = dict[str, dict[str, bool]]


def rows_of(job: Path, sql: str) -> list[dict[str, Any]]:
    with open_sql([job]) as session:
        return list(session.query(sql).to_pylist())


def processes_of(root: Path, mark: str) -> list[int]:
    """Those of the runs below `root` that have the mark in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        # processes of others, and those that ended meanwhile
        with suppress(OSError):
            is_meant = mark.encode() in (folder / "cmdline").read_bytes()
            if is_meant and str(root).encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


@pytest.fixture(scope="session")
def questions(taskset: Path) -> Path:
    """GSM8K's own text where it lies beside the project, else the synthetic set."""
    folder = SHARED / "gsm8k"
    return folder if folder.exists() else taskset


@pytest.fixture(scope="session")
def solutions() -> Solutions:
    """Of each question of the test split the solutions of four models, and whether they are right."""
    file = SHARED / "gsm8k_solutions" / "example_model_solutions.jsonl"
    if not file.exists():
        pytest.skip("../shared/gsm8k_solutions is not there")
    return {
        row["question"]: {
            each["solution"]: each["is_correct"] for each in row.values() if isinstance(each, dict)
        }
        for row in map(json.loads, file.read_text().splitlines())
    }


@pytest.fixture(scope="session")
def solutions_script(solutions: Solutions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers of the fake engine: to each question one of its solutions, as the seed has it."""
    script = tmp_path_factory.mktemp("solutions") / "script.json"
    script.write_text(json.dumps({question: [*texts] for question, texts in solutions.items()}))
    return script


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

    def run_pipeline(file: Path, root: Path, name: str, *overrides: str, seconds: float = 400) -> Path:
        own = {"TRINITY_CHECKPOINT_ROOT_DIR": str(root), "TRINITY_RUN_NAME": name}
        command = [sys.executable, "-m", "trinity_data.cli.main", "run", str(file), *overrides]
        done = subprocess.run(
            command, env=run_environment | own, capture_output=True, text=True, timeout=seconds, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return root / "tests" / name

    return run_pipeline


@pytest.fixture
def start_part(run_environment: dict[str, str], tmp_path: Path) -> StartPart:
    """`start_part(mode, *overrides)`: one process of the pair, or of `file`, whose output is one text, with
    `more` in its environment.
    """

    def start_part(
        mode: str, *overrides: str, file: Path = PAIR, more: Mapping[str, str] = EMPTY
    ) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "trinity_data.cli.main",
            "run",
            str(file),
            f"mode={mode}",
            *overrides,
        ]
        own = {"TRINITY_CHECKPOINT_ROOT_DIR": str(tmp_path), "TRINITY_RUN_NAME": "pair"}
        output = subprocess.PIPE, subprocess.STDOUT
        return subprocess.Popen(
            command, env=run_environment | own | dict(more), stdout=output[0], stderr=output[1], text=True
        )

    return start_part
