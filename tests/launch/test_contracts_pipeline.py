"""pipelines/gsm8k_contracts.yaml on questions of GSM8K with right and wrong solutions of models, and the
pipeline files that train on what such a run left behind.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.launch.conftest import RunPipeline, Solutions, rows_of
from trinity_data.cli.main import cli
from trinity_data.query.audit import audit

PIPELINES = Path(__file__).parents[2] / "pipelines"
# those of the file, and reward_drift
NUM_CONTRACTS, STEPS = 11, 4


@pytest.fixture(scope="module")
def job(
    run_pipeline: RunPipeline,
    solutions_script: Path,
    shared_gsm8k: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    root = tmp_path_factory.mktemp("contracts")
    run_pipeline(
        PIPELINES / "gsm8k_contracts.yaml", root, "run", f"buffer.total_steps={STEPS}", "buffer.batch_size=8",
        "explorer.rollout_model.engine_type=fake", f"explorer.rollout_model.script={solutions_script}",
        "model.max_prompt_tokens=700", "model.max_response_tokens=200", "monitor.monitor_type=none",
        f"buffer.explorer_input.taskset.path={shared_gsm8k}", "buffer.explorer_input.taskset.split=test",
        "buffer.explorer_input.eval_tasksets.0.split=train", "buffer.explorer_input.eval_tasksets.0.limit=8",
        "contracts.reward_jump.steps=2",
    )  # fmt: skip
    return root / "gsm8k" / "run"


def test_each_reward_is_what_the_authors_say_of_the_solution(job: Path, solutions: Solutions) -> None:
    rows = rows_of(
        job,
        "select prompt, response_text, metrics['accuracy'] as accuracy from experiences "
        "join tasks using (stage, task_id) where coalesce(truncated, '') = ''",
    )
    assert len(rows) > 100
    assert all(solutions[row["prompt"]][row["response_text"]] == row["accuracy"] for row in rows)
    assert {row["accuracy"] for row in rows} == {0.0, 1.0}


def test_the_pipeline_holds_its_steps_to_its_contracts(job: Path) -> None:
    report = audit(job)
    assert report.ok
    found = rows_of(job, "select * from contracts order by step")
    states = rows_of(
        job,
        "select count(*) filter (state = 'dropped' and dropped_by = contract) as dropped, "
        "count(*) as named from (select contract, unnest(dropped_ids) as experience_id from contracts) "
        "join experiences using (experience_id)",
    )[0]
    assert len(found) == NUM_CONTRACTS * STEPS
    assert all(row["held"] for row in found if row["action"] == "stop")
    assert states["dropped"] == states["named"] == sum(len(row["dropped_ids"]) for row in found)
    recomputed = [row["message"] for row in found if row["kind"] == "recomputation"]
    assert all("holds: 0 of 8 recomputed rewards are not" in message for message in recomputed)
    jumps = [row["value"] for row in found if row["contract"] == "reward_jump"]
    assert jumps[:2] == [None, None] and None not in jumps[2:]


def test_groups_with_a_right_answer_that_was_cut_are_not_trained(job: Path) -> None:
    named = rows_of(
        job,
        "select row_ids, dropped_ids from contracts where contract = 'cut_and_right' and not held",
    )
    cut = rows_of(
        job,
        "select experience_id, group_id, state from experiences where group_id in "
        "(select group_id from experiences where truncated = 'response' and raw_reward > 0.5)",
    )
    assert named and cut
    assert "trained" not in {row["state"] for row in cut}


def test_the_stored_run_breaks_the_same_contracts(job: Path) -> None:
    result = CliRunner().invoke(cli, ["contracts", str(job)])
    broken = rows_of(job, "select step, message from contracts where not held")
    assert (result.exit_code, bool(broken)) == (1, True), result.output
    assert all(f"step {row['step']}: {row['message']}" in result.stdout for row in broken)


@pytest.mark.parametrize(
    ("name", "num_rows"),
    [pytest.param("sft_from_buffer", 8, marks=pytest.mark.slow), ("dpo_from_buffer", 16)],
)
def test_a_run_trains_on_the_solutions_that_another_one_left_behind(
    run_pipeline: RunPipeline, job: Path, tmp_path: Path, name: str, num_rows: int
) -> None:
    run_pipeline(
        PIPELINES / f"{name}.yaml", tmp_path, name, f"buffer.trainer_input.experience_buffer.path={job}",
        "buffer.total_steps=2", "buffer.train_batch_size=8", "model.max_model_len=1000",
        "monitor.monitor_type=none",
    )  # fmt: skip
    trained = tmp_path / "gsm8k" / name
    assert audit(trained).ok
    first, second = rows_of(trained, "select loss, num_experiences from steps order by step")
    assert (first["num_experiences"], second["num_experiences"]) == (num_rows, num_rows)
    assert second["loss"] < first["loss"]
    if name == "dpo_from_buffer":
        # the policy is its own reference
        assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)
