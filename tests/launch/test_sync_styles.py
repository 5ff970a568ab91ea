"""Runs of every `sync_style`, and in turns, that are killed and started again: nothing is lost or doubled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.conftest import PAIR, StartPart, rows_of
from tests.launch.test_pair import ends, wait_for
from trinity_data.query.audit import audit

PIPELINES = Path(__file__).parents[2] / "pipelines"
STEPS, TASKS, REPEAT_TIMES = 6, 8, 4
SMALL = (
    f"buffer.total_steps={STEPS}", f"buffer.batch_size={TASKS}", f"algorithm.repeat_times={REPEAT_TIMES}",
    "explorer.rollout_model.engine_type=fake", "explorer.refill_rounds=0", "monitor.monitor_type=none",
    "buffer.explorer_input.eval_tasksets=[]",
)  # fmt: skip
OLDEST = "select max(step - 1 - model_version) as age, count(*) as rows, count(distinct task_id) as tasks "
OLDEST += "from experiences"


def check(job: Path, *, most_stale: int) -> None:
    """Every step has its rows once, none staler than allowed."""
    assert audit(job / "store").ok
    (made,) = rows_of(job, OLDEST)
    assert (made["rows"], made["tasks"]) == (STEPS * TASKS * REPEAT_TIMES, STEPS * TASKS)
    assert made["age"] <= most_stale
    steps = rows_of(job, "select step, num_experiences as rows from steps order by step")
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert {row["rows"] for row in steps} == {TASKS * REPEAT_TIMES}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "mode", "overrides", "most_stale"),
    [
        (PIPELINES / "gsm8k_fully_async.yaml", "both", (), 4),
        (PAIR, "both", ("synchronizer={sync_style: trainer_driven, trainer_sync_interval: 2}",), 8),
        (PIPELINES / "colocate.yaml", "colocate", (), 1),
    ],
    ids=["fully_async", "trainer_driven", "colocate"],
)
def test_one_command_that_is_killed_goes_on(
    start_part: StartPart,
    tmp_path: Path,
    file: Path,
    mode: str,
    overrides: tuple[str, ...],
    most_stale: int,
) -> None:
    job = tmp_path / ("tests" if file == PAIR else "gsm8k") / "pair"
    first = start_part(mode, *SMALL, *overrides, file=file)
    wait_for(job, "(select max(step) from steps) >= 2", first)
    first.kill()
    first.wait()
    ends(start_part(mode, *SMALL, *overrides, file=file))
    check(job, most_stale=most_stale)


@pytest.mark.slow
def test_an_explorer_that_drives_and_its_trainer_are_each_killed_and_go_on(
    start_part: StartPart, tmp_path: Path
) -> None:
    job = tmp_path / "tests" / "pair"
    style = "synchronizer={sync_style: explorer_driven, explorer_sync_interval: 2, sync_timeout: 120}"
    overrides = (*SMALL, style)
    explorer, trainer = start_part("explore", *overrides), start_part("train", *overrides)
    wait_for(job, "(select max(step) from steps) >= 2", trainer)
    trainer.kill()
    again = start_part("train", *overrides)
    wait_for(job, "(select max(step) from steps) >= 4", again)
    explorer.kill()
    ends(start_part("explore", *overrides))
    ends(again)
    check(job, most_stale=8)


@pytest.mark.slow
@pytest.mark.parametrize("style", ["explorer_driven", "trainer_driven", "fully_async"])
def test_two_explorers_share_the_steps_of_every_style(
    start_part: StartPart, tmp_path: Path, style: str
) -> None:
    interval = "explorer_sync_interval" if style == "explorer_driven" else "trainer_sync_interval"
    overrides = (*SMALL, f"synchronizer={{sync_style: {style}, {interval}: 2, sync_timeout: 120}}")
    explorers = [start_part("explore", *overrides, f"explorer.name={name}") for name in ("one", "two")]
    trainer = start_part("train", *overrides)
    for part in (*explorers, trainer):
        ends(part)
    check(tmp_path / "tests" / "pair", most_stale=8)
