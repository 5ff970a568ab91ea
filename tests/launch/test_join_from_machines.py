"""An explorer joins a pair of commands from a machine that has no folder in common with theirs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import machine
from tests.launch.conftest import PAIR, rows_of
from tests.launch.test_pair import OF_THE_VERSIONS
from trinity_data.query.audit import audit

pytestmark = pytest.mark.slow
STEPS, INTERVAL, TASKS_A_STEP, ROLLOUTS = 9, 3, 8, 4


def test_an_explorer_on_a_machine_without_the_job_folder_has_its_steps_and_its_loss_costs_no_row(
    run_environment: dict[str, str], tmp_path: Path
) -> None:
    if not machine.are_there():
        pytest.skip("needs `unshare -rmpf`, for machines that see nothing of each other")
    overrides = [
        f"buffer.total_steps={STEPS}",
        f"synchronizer.sync_interval={INTERVAL}",
        f"explorer.eval_interval={INTERVAL}",
        "explorer.rollout_model.engine_type=transformers",
        # the trainer waits for the start of the explorer, which a busy machine may take minutes for
        "synchronizer.sync_timeout=400",
    ]
    command = [sys.executable, "-m", "tests.launch.join_from_machines", str(tmp_path), str(PAIR), *overrides]
    done = subprocess.run(
        command, env=run_environment, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    for name in ("explorer", "trainer"):
        assert outcome[name]["code"] == 0, outcome[name]["output"]
    job = tmp_path / "shared" / "tests" / "nodes"
    found = audit(job / "store")
    assert found.ok, found.problems
    rows = rows_of(job, "select experience_id, step, explorer, model_version from experiences")
    assert len({row["experience_id"] for row in rows}) == len(rows)
    assert Counter(row["step"] for row in rows) == dict.fromkeys(range(1, STEPS + 1), TASKS_A_STEP * ROLLOUTS)
    # by the memory of the trainer's machine, which neither of the others has
    assert {row["method"] for row in rows_of(job, OF_THE_VERSIONS)} == {"memory"}
    newer = Counter(row["explorer"] for row in rows if row["model_version"])
    assert newer["joins"] and newer["explorer"]
    groups = rows_of(job, "select task_id, epoch from groups")
    assert max(Counter((row["task_id"], row["epoch"]) for row in groups).values()) == 1
    died = rows_of(job, "select message from events where kind = 'died'")
    assert [row["message"].partition(" ")[0].rstrip(":,") for row in died] == ["explorer:joins"]
    own = tmp_path / "own" / "tests" / "nodes"
    assert not (own / "store").exists()
    assert {file.name for file in (own / "log").iterdir()} == {"joins.log", "joins_engine_0.log"}
