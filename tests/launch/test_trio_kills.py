"""Two explorers and a trainer that are killed at random: every task is tried once, every step is whole.

TRINITY_TRIO_KILLS says how often at most, TRINITY_KILL_SECONDS how long.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.launch.conftest import StartPart, rows_of
from tests.launch.test_pair_kills import KILL_SECONDS, kill
from trinity_data.query.audit import audit

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("TRINITY_TRIO_KILLS", 100))
STEPS_A_KILL, ROWS_A_STEP = 3, 32
PARTS = {
    "explore": ("explore",),
    "explore more": ("explore", "explorer.name=more"),
    "train": ("train",),
}


def test_explorers_that_are_killed_leave_no_task_out_and_try_none_twice(
    start_part: StartPart, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, steps = tmp_path / "tests" / "pair", STEPS_A_KILL * KILLS
    overrides = [f"buffer.total_steps={steps}", "buffer.total_epochs=100", "synchronizer.sync_interval=4"]
    overrides.append("explorer.refill_rounds=0")
    running: dict[str, subprocess.Popen[str]] = {}
    done, killed, chance = set[str](), list[str](), random.Random(7)
    end = time.monotonic() + KILL_SECONDS
    while len(done) < len(PARTS):
        for name, (mode, *own) in PARTS.items():
            if name in done:
                continue
            process = running.get(name)
            if process is not None and process.poll() is not None:
                output = process.communicate()[0]
                assert "Traceback" not in output, output
                done |= {name} if process.returncode == 0 else set()
            if name not in done and (process is None or process.returncode is not None):
                running[name] = start_part(mode, *overrides, *own)
        time.sleep(chance.uniform(0.5, 12))
        if len(killed) < KILLS and time.monotonic() < end:
            what = chance.choice([*PARTS, "StoreActor"])
            killed += kill(tmp_path, what, running, chance)
    handed_on = rows_of(job, "select step, message from events where kind = 'handed_on' order by step")
    with capsys.disabled():
        print(f" {len(killed)} kills: {sorted(killed)}, {len(handed_on)} steps handed on", flush=True)
    found = audit(job / "store")
    assert found.ok, found.problems
    groups = rows_of(job, "select group_id, task_id, epoch, step from groups")
    assert max(Counter((row["task_id"], row["epoch"]) for row in groups).values()) == 1
    assert {row["group_id"].partition("/")[0] for row in groups} == {"explorer", "more"}
    rows = rows_of(job, "select experience_id, step from experiences")
    assert len({row["experience_id"] for row in rows}) == len(rows)
    assert Counter(row["step"] for row in rows) == dict.fromkeys(range(1, steps + 1), ROWS_A_STEP)
    trained = rows_of(job, "select count(*) as n, sum(num_experiences) as rows from steps")
    assert trained == [{"n": steps, "rows": steps * ROWS_A_STEP}]
