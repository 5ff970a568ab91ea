"""pipelines/gsm8k_contracts.yaml at small size."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from tests.launch.conftest import RunPipeline
from trinity_data.cli.main import cli
from trinity_data.query.audit import audit
from trinity_data.store.sql import open_sql

ROOT = Path(__file__).parents[2]
NUM_CONTRACTS, STEPS = 10, 4


def test_the_pipeline_holds_its_steps_to_its_contracts(
    run_pipeline: RunPipeline, tmp_path: Path, taskset: Path
) -> None:
    run_pipeline(
        ROOT / "pipelines" / "gsm8k_contracts.yaml", tmp_path, "run",
        "explorer.rollout_model.engine_type=fake", "buffer.batch_size=8",
        f"buffer.total_steps={STEPS}", "monitor.monitor_type=none",
        f"buffer.explorer_input.taskset.path={taskset}", "buffer.explorer_input.taskset.limit=200",
        "buffer.explorer_input.eval_tasksets.0.limit=8", "contracts.reward_jump.steps=2",
    )  # fmt: skip
    job = tmp_path / "gsm8k" / "run"
    report = audit(job)
    assert report.ok
    with open_sql([job]) as session:
        found = session.query("select * from contracts order by step").to_pylist()
        states = session.query(
            "select count(*) filter (state = 'dropped' and dropped_by = contract) as dropped, "
            "count(*) as named from (select contract, unnest(dropped_ids) as experience_id from contracts) "
            "join experiences using (experience_id)"
        ).to_pylist()[0]
        trained_bad = session.query(
            "select count(*) as n from experiences where truncated = 'response' and raw_reward > 0.5 "
            "and state = 'trained'"
        ).to_pylist()
    assert len(found) == NUM_CONTRACTS * STEPS
    assert all(row["held"] for row in found if row["action"] == "stop")
    assert states["dropped"] == states["named"] == sum(len(row["dropped_ids"]) for row in found)
    assert trained_bad == [{"n": 0}]
    jumps = [row["value"] for row in found if row["contract"] == "reward_jump"]
    assert jumps[:2] == [None, None] and None not in jumps[2:]
    # the stored run says the same
    result = CliRunner().invoke(cli, ["contracts", str(job)])
    broken = [row for row in found if not row["held"]]
    assert result.exit_code == bool(broken), result.output
    assert all(f"step {row['step']}: {row['message']}" in result.stdout for row in broken)
