"""Two explorers and a trainer that are killed at random: every task is tried once, every step is whole.

TRINITY_TRIO_KILLS says how often at most, TRINITY_KILL_SECONDS how long.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from tests.launch.conftest import StartPart, rows_of
from tests.launch.disturbed_run import DisturbedRun
from tests.launch.test_pair_kills import KILL_SECONDS, SECONDS_A_KILL
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
    start = {
        name: partial(start_part, mode, "--quiet", *overrides, *own) for name, (mode, *own) in PARTS.items()
    }
    run = DisturbedRun(tmp_path, start, random.Random(7))
    killed = run.killed(
        (*PARTS, "StoreActor"), kills=KILLS, seconds=KILL_SECONDS, most_seconds=SECONDS_A_KILL
    )
    handed_on = rows_of(job, "select step, message from events where kind = 'handed_on' order by step")
    with capsys.disabled():
        print(f" {len(killed)} kills: {dict(Counter(killed))}, {len(handed_on)} steps handed on", flush=True)
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
