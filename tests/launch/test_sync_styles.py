"""Runs whose versions depend on who is faster: killed and started again, they lose and double nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.conftest import StartPart, rows_of
from tests.launch.test_pair import ends, wait_for
from trinity_data.query.audit import audit

STEPS, ROWS_A_STEP = 6, 32
MORE = ("buffer.explorer_input.eval_tasksets=[]", "explorer.refill_rounds=0", f"buffer.total_steps={STEPS}")
OLDEST = "select max(step - 1 - model_version) as age, count(*) as rows, count(distinct task_id) as tasks "
OLDEST += "from experiences"


def check(job: Path, *, most_stale: int) -> None:
    """Every step has its rows once, none staler than allowed."""
    assert audit(job / "store").ok
    (made,) = rows_of(job, OLDEST)
    # eight tasks a step, each tried in one group of four
    assert (made["rows"], made["tasks"]) == (STEPS * ROWS_A_STEP, STEPS * 8)
    assert made["age"] <= most_stale
    stale = rows_of(
        job, "select max(step - 1 - model_version) as age from experiences where state = 'trained'"
    )
    assert stale[0]["age"] <= most_stale
    steps = rows_of(job, "select step from steps order by step")
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))


@pytest.mark.parametrize(
    ("style", "most_stale"),
    [("{sync_style: trainer_driven, trainer_sync_interval: 2}", 8), ("{sync_style: fully_async}", 4)],
)
def test_one_command_that_is_killed_goes_on(
    start_part: StartPart, tmp_path: Path, style: str, most_stale: int
) -> None:
    job = tmp_path / "tests" / "pair"
    overrides = (*MORE, f"synchronizer={style}")
    first = start_part("both", *overrides)
    wait_for(job, "(select max(step) from steps) >= 2", first)
    first.kill()
    first.wait()
    ends(start_part("both", *overrides))
    check(job, most_stale=most_stale)


def test_an_explorer_that_drives_and_its_trainer_are_each_killed_and_go_on(
    start_part: StartPart, tmp_path: Path
) -> None:
    job = tmp_path / "tests" / "pair"
    style = "synchronizer={sync_style: explorer_driven, explorer_sync_interval: 2, sync_timeout: 120}"
    overrides = (*MORE, style)
    explorer, trainer = start_part("explore", *overrides), start_part("train", *overrides)
    wait_for(job, "(select max(step) from steps) >= 2", trainer)
    trainer.kill()
    again = start_part("train", *overrides)
    wait_for(job, "(select max(step) from steps) >= 4", again)
    explorer.kill()
    ends(start_part("explore", *overrides))
    ends(again)
    check(job, most_stale=8)
