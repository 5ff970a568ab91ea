"""Explorers join a run, share the order of its tasks, and finish what one of them leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.launch.conftest import StartPart, rows_of
from tests.launch.test_pair import ends, wait_for
from trinity_data.claims import Claims
from trinity_data.progress import claims_key
from trinity_data.query.audit import audit
from trinity_data.store.reader import StoreReader

STEPS, INTERVAL, TASKS_A_STEP, ROLLOUTS = 6, 3, 8, 4
STAGE = "grpo"


def kill_with_an_open_step(job: Path, explorer: str, process: subprocess.Popen[str]) -> int:
    """Kills an explorer that has begun a step and not ended it; returns the step."""
    store, end = StoreReader(job / "store"), time.monotonic() + 200

    def open_step() -> int | None:
        value = store.progress(claims_key(STAGE))
        holders = Claims.load(value).open if value is not None else {}
        return next((step for step, place in holders.items() if place.name == explorer), None)

    while time.monotonic() < end:
        assert process.poll() is None, process.communicate()[0]
        if open_step() is not None:
            process.send_signal(signal.SIGSTOP)
            # what it has sent arrives
            time.sleep(0.5)
            if (step := open_step()) is not None:
                process.kill()
                process.wait()
                store.close()
                return step
            process.send_signal(signal.SIGCONT)
        time.sleep(0.002)
    raise AssertionError(f"{explorer} has begun no step")


@pytest.mark.parametrize(
    "late",
    [(), pytest.param(("explorer.over_rollout={ratio: 0.4, wait_after_min: 0}",), marks=pytest.mark.slow)],
)
def test_two_explorers_share_steps_and_tasks_and_one_finishes_what_the_other_left(
    start_part: StartPart, tmp_path: Path, late: tuple[str, ...]
) -> None:
    job = tmp_path / "tests" / "pair"
    common = [f"buffer.total_steps={STEPS}", *late]
    common += [f"{key}={INTERVAL}" for key in ("synchronizer.sync_interval", "explorer.eval_interval")]
    first = start_part("explore", *common)
    second = start_part("explore", *common, "explorer.name=explorer_new")
    trainer = start_part("train", *common)
    wait_for(job, "(select count(*) from events where kind = 'explorer_started') >= 2", trainer)
    left = kill_with_an_open_step(job, "explorer:explorer", first)
    ends(second)
    ends(trainer)
    found = audit(job / "store")
    assert found.ok, found.problems
    groups = rows_of(job, "select group_id, step, task_id, epoch from groups")
    assert max(Counter((row["task_id"], row["epoch"]) for row in groups).values()) == 1
    assert {row["group_id"].partition("/")[0] for row in groups} == {"explorer", "explorer_new"}
    events = rows_of(job, "select step, message from events where kind = 'handed_on'")
    message = "explorer:explorer had begun it; explorer:explorer_new goes on with it"
    assert {"step": left, "message": message} in events and len(events) <= 1 + len(late)
    rows = rows_of(job, "select experience_id, step, explorer, state from experiences")
    assert len({row["experience_id"] for row in rows}) == len(rows)
    assert Counter(row["step"] for row in rows) == dict.fromkeys(range(1, STEPS + 1), TASKS_A_STEP * ROLLOUTS)
    (trained,) = rows_of(job, "select count(*) as n, sum(num_experiences) as rows from steps")
    # a batch of a step with late groups is smaller
    assert trained["n"] == STEPS and (late or trained["rows"] == STEPS * TASKS_A_STEP * ROLLOUTS)
    store = StoreReader(job / "store")
    assert not Claims.load(store.progress(claims_key(STAGE))).late
    store.close()
    evaluated = rows_of(job, "select model_version, count(*) as n from evals group by all order by all")
    assert [row for row in evaluated if row["model_version"]] == [
        {"model_version": version, "n": 16} for version in (INTERVAL, STEPS)
    ]
    kinds = rows_of(job, "select kind from events where kind in ('joined', 'died', 'left')")
    assert Counter(row["kind"] for row in kinds) == {"joined": 3, "died": 1, "left": 2}
    assert os.path.exists(job / "log" / "explorer_new.log")
