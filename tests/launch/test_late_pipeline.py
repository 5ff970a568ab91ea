"""pipelines/gsm8k_late.yaml at small size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.conftest import RunPipeline, rows_of
from trinity_data.query.audit import audit

FILE = Path(__file__).parents[2] / "pipelines" / "gsm8k_late.yaml"
STEPS, TASKS = 4, 8


@pytest.mark.slow
def test_every_group_is_made_and_each_that_is_late_joins_a_step(
    run_pipeline: RunPipeline, tmp_path: Path
) -> None:
    run_pipeline(
        FILE, tmp_path, "run", f"buffer.total_steps={STEPS}", f"buffer.batch_size={TASKS}",
        "explorer.over_rollout.wait_after_min=0", "explorer.runner_per_model=2",
        "explorer.rollout_model.engine_type=fake", "monitor.monitor_type=none",
    )  # fmt: skip
    job = tmp_path / "gsm8k" / "run"
    assert audit(job).ok
    groups = rows_of(job, "select step, count(*) as n from groups group by step order by step")
    assert groups == [{"step": step, "n": TASKS} for step in range(1, STEPS + 1)]
    (made,) = rows_of(job, "select count(distinct group_id) as groups, count(*) as rows from experiences")
    assert (made["groups"], made["rows"]) == (STEPS * TASKS, STEPS * TASKS * 8)
    (late,) = rows_of(
        job,
        "select sum(metrics['rollout/late_groups']) as late, "
        "sum(metrics['rollout/joined_groups']) as joined, "
        "sum(metrics['rollout/number']) as number from steps",
    )
    assert late["late"] == late["joined"]
    assert late["number"] == STEPS * TASKS * 8
