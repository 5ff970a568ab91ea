"""The machine of trainer and store is lost, and the trainer's command started on another one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import machine
from tests.launch.conftest import PAIR, RunPipeline, rows_of
from tests.launch.test_pair import check_equal

pytestmark = pytest.mark.slow
STEPS = 6


def lose(root: Path, explorer: str, moment: str, environment: dict[str, str]) -> dict[str, Any]:
    """The outcome of lose_trainer_machine.py, whose commands ended well."""
    if not machine.are_there():
        pytest.skip("needs `unshare -rmpf`, for machines that see nothing of each other")
    overrides = [
        f"buffer.total_steps={STEPS}",
        "synchronizer.sync_timeout=400",
    ]
    command = [sys.executable, "-m", "tests.launch.lose_trainer_machine", str(root), str(PAIR)]
    done = subprocess.run(
        [*command, explorer, moment, *overrides], env=environment, capture_output=True, text=True,
        timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    outcome: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for name in ("trainer", "explorer"):
        assert outcome[name]["code"] == 0, outcome[name]["output"]
    return outcome


@pytest.fixture(scope="module")
def whole(run_pipeline: RunPipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in one process."""
    return run_pipeline(PAIR, tmp_path_factory.mktemp("one"), "whole", f"buffer.total_steps={STEPS}")


@pytest.mark.parametrize("explorer", ["own", "shared"])
def test_a_trainer_and_its_store_that_are_lost_go_on_elsewhere_and_the_explorer_joins_again(
    run_environment: dict[str, str], whole: Path, tmp_path: Path, explorer: str
) -> None:
    lose(tmp_path, explorer, "3", run_environment)
    job = tmp_path / "shared" / "tests" / "nodes"
    check_equal(job, whole, STEPS)
    again = rows_of(job, "select message from events where kind = 'ray_restarted'")
    assert [row["message"].partition(": ")[0] for row in again] == ["explorer:explorer"]
    started = rows_of(job, "select step from events where kind = 'stage_started' order by step")
    # the second one from a checkpoint, which the trainer writes after each two steps
    assert [row["step"] for row in started] in ([0, 2], [0, 4])


@pytest.mark.parametrize("explorer", ["own", "shared"])
def test_weights_of_the_last_step_that_were_lost_on_their_way_are_evaluated_all_the_same(
    run_environment: dict[str, str], whole: Path, tmp_path: Path, explorer: str
) -> None:
    outcome = lose(tmp_path, explorer, f"end{STEPS}", run_environment)
    assert outcome["evaluated"] < STEPS
    job = tmp_path / "shared" / "tests" / "nodes"
    check_equal(job, whole, STEPS)
    finished = rows_of(job, "select step from events where kind = 'stage_finished'")
    assert [row["step"] for row in finished] == [STEPS]
