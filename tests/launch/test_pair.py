"""Explorer and trainer as two commands make what one process makes, and each may end and come back."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.launch.conftest import PAIR, RunPipeline, StartPart, processes_of, rows_of
from trinity_data.errors import StoreError
from trinity_data.query.audit import audit

OF_THE_ROWS = (
    "select experience_id, step, task_id, state, raw_reward, reward, model_version, response_text from "
)
OF_THE_ROWS += "experiences order by experience_id"
OF_THE_STEPS = "select step, num_experiences, loss, grad_norm from steps order by step"

OF_THE_VERSIONS = "select method, path from model_versions"
OF_THE_EVALUATIONS = "select step, model_version, taskset, task_id, reward from evals order by all"


def ends(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output


def weights_of(job: Path, steps: int) -> str:
    file = job / f"global_step_{steps}" / "actor" / "model_world_size_1_rank_0.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()


def check_equal(pair: Path, whole: Path, steps: int) -> None:
    """Rows, steps, evaluations and weights of the two are the same, and the pair's are all accounted for."""
    for query in (OF_THE_ROWS, OF_THE_STEPS, OF_THE_EVALUATIONS):
        assert rows_of(pair, query) == rows_of(whole, query)
    assert weights_of(pair, steps) == weights_of(whole, steps)
    assert audit(pair / "store").ok


def wait_for(job: Path, sql: str, process: subprocess.Popen[str]) -> None:
    """Until the query answers yes."""
    end = time.monotonic() + 200
    while time.monotonic() < end:
        assert process.poll() is None, process.communicate()[0]
        with contextlib.suppress(StoreError):
            if rows_of(job, f"select {sql} as yes")[0]["yes"]:
                return
        time.sleep(0.1)
    raise AssertionError(sql)


def test_two_commands_make_what_one_makes_though_each_is_killed_and_started_again(
    start_part: StartPart, run_pipeline: RunPipeline, tmp_path: Path
) -> None:
    pair, steps = tmp_path / "tests" / "pair", "buffer.total_steps=8"
    explorer, trainer = start_part("explore", steps), start_part("train", steps)
    wait_for(pair, "(select max(step) from steps) >= 3", trainer)
    trainer.kill()
    again = start_part("train", steps)
    wait_for(pair, "(select max(step) from steps) >= 5", again)
    explorer.kill()
    last = start_part("explore", steps)
    ends(last)
    ends(again)
    check_equal(pair, run_pipeline(PAIR, tmp_path, "whole", steps), steps=8)
    kinds = rows_of(pair, "select kind from events where kind in ('joined', 'died', 'left') order by \"at\"")
    assert sorted(row["kind"] for row in kinds) == ["died"] * 2 + ["joined"] * 4 + ["left"] * 2
    # by memory, which is given back with the Ray that the two shared
    (by,) = {(row["method"], Path(row["path"]).parent) for row in rows_of(pair, OF_THE_VERSIONS)}
    assert by[0] == "memory"
    while by[1].exists():
        time.sleep(0.1)
    logs = {file.name for file in (pair / "log").iterdir()}
    assert logs >= {"explorer.log", "trainer.log", "trainer_rank_0.log", "store.log"}
    assert "run.log" not in logs


@pytest.mark.slow
@pytest.mark.parametrize("what", ["ray_host", "raylet/raylet", "gcs_server"])
def test_two_commands_whose_ray_is_killed_go_on_by_themselves_with_another(
    start_part: StartPart, run_pipeline: RunPipeline, tmp_path: Path, what: str
) -> None:
    pair, steps = tmp_path / "tests" / "pair", "buffer.total_steps=6"
    explorer, trainer = start_part("explore", steps), start_part("train", steps)
    wait_for(pair, "(select max(step) from steps) >= 3", trainer)
    for process in processes_of(tmp_path, what):
        os.kill(process, signal.SIGKILL)
    ends(explorer)
    ends(trainer)
    check_equal(pair, run_pipeline(PAIR, tmp_path, "whole", steps), steps=6)
    joined = rows_of(pair, "select message from events where kind = 'ray_restarted' order by message")
    assert [row["message"].partition(": ")[0] for row in joined] == ["explorer:explorer", "trainer"]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["raylet/raylet", "gcs_server"])
def test_one_command_whose_ray_is_killed_goes_on_by_itself_with_another(
    start_part: StartPart, run_pipeline: RunPipeline, tmp_path: Path, what: str
) -> None:
    job, steps = tmp_path / "tests" / "pair", "buffer.total_steps=6"
    run = start_part("both", steps)
    wait_for(job, "(select max(step) from steps) >= 3", run)
    for process in processes_of(tmp_path, what):
        os.kill(process, signal.SIGKILL)
    ends(run)
    check_equal(job, run_pipeline(PAIR, tmp_path, "whole", steps), steps=6)
    (event,) = rows_of(job, "select message from events where kind = 'ray_restarted'")
    assert event["message"].startswith("run: has another; a process of this run's Ray was killed")
