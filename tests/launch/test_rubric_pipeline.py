"""pipelines/gsm8k_rubric.yaml on questions of GSM8K and solutions of models."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.conftest import RunPipeline, rows_of
from trinity_data.query.audit import audit

ROOT = Path(__file__).parents[2]
STEPS, TASKS, ROLLOUTS = 3, 8, 8


@pytest.fixture(scope="module")
def job(
    run_pipeline: RunPipeline,
    solutions_script: Path,
    shared_gsm8k: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    root = tmp_path_factory.mktemp("rubric")
    run_pipeline(
        ROOT / "pipelines" / "gsm8k_rubric.yaml", root, "run", f"buffer.total_steps={STEPS}",
        f"buffer.batch_size={TASKS}", "explorer.rollout_model.engine_type=fake",
        f"explorer.rollout_model.script={solutions_script}",
        f"explorer.auxiliary_models.0.script={ROOT / 'pipelines' / 'grader.json'}",
        "model.max_prompt_tokens=700", "model.max_response_tokens=200", "monitor.monitor_type=none",
        f"buffer.explorer_input.taskset.path={shared_gsm8k}", "buffer.explorer_input.taskset.split=test",
    )  # fmt: skip
    return root / "gsm8k" / "run"


def test_every_row_of_the_run_is_accounted_for(job: Path) -> None:
    assert audit(job).ok


def test_the_grader_scores_each_task_before_it_is_tried(job: Path) -> None:
    tasks = rows_of(job, "select kept, scores['llm_difficulty_score'] as score from tasks")
    # (2 + 2 + 1 + 3 + 1) / 5 dimensions / 5
    assert all(row["kept"] for row in tasks)
    assert [row["score"] for row in tasks] == pytest.approx([0.36] * len(tasks))
    (spent,) = rows_of(
        job,
        "select sum(rows_in) as rows_in, sum(requests_spent) as requests from operator_yield "
        "where operator = 'llm_difficulty_score_filter'",
    )
    assert spent["requests"] == spent["rows_in"] == len(tasks) > STEPS * TASKS


def test_the_grader_is_asked_about_rows_of_groups_with_right_and_wrong_answers_alone(job: Path) -> None:
    groups = rows_of(
        job,
        "select count(distinct metrics['accuracy']) = 2 as is_mixed, count(*) filter "
        "(scores['rubric_score'] is not null) as num_scored from experiences group by group_id",
    )
    assert {(row["is_mixed"], row["num_scored"]) for row in groups} == {(True, ROLLOUTS), (False, 0)}
    asked = rows_of(
        job,
        "select sum(requests_spent) as requests, min(tokens_spent) as tokens from operator_yield "
        "where operator = 'rubric_score'",
    )[0]
    assert asked["requests"] == sum(row["num_scored"] for row in groups)
    assert asked["tokens"] > 0


def test_further_tasks_make_up_for_groups_that_teach_nothing(job: Path) -> None:
    rounds = rows_of(job, "select step, max(round) as rounds, count(*) as groups from groups group by step")
    assert all(0 <= row["rounds"] <= 2 for row in rounds)
    assert max(row["rounds"] for row in rounds) > 0
    assert all((row["groups"] > TASKS) == (row["rounds"] > 0) for row in rounds)


def test_the_reward_is_the_sum_of_what_the_operators_say(job: Path) -> None:
    rows = rows_of(
        job,
        "select raw_reward, reward, scores, response_text from experiences "
        "where scores['rubric_score'] is not null",
    )
    for row in rows:
        scores = dict(row["scores"])
        # the weighted means of (5, 4) and (2, 3)
        assert scores["rubric_score"] == (4.75 if "*" in row["response_text"] else 2.25)
        shaped = row["raw_reward"] - 0.2 * scores["repetition"] + scores["length_penalty"]
        shaped += 0.05 * scores["rubric_score"] + 0.2 * scores["diversity"]
        assert row["reward"] == pytest.approx(shaped, abs=1e-6)
    assert {dict(row["scores"])["rubric_score"] for row in rows} == {2.25, 4.75}
