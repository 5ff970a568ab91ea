"""pipelines/gsm8k_curriculum.yaml at small size, on GSM8K's own text where it lies beside the project."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.conftest import RunPipeline
from trinity_data.query.audit import audit
from trinity_data.store.sql import open_sql

SQL = "select task_id, exp(-scores['difficulty']) as weight from task_stats where groups = 0"
ROOT = Path(__file__).parents[2]
MORE = """[
  {name: gsm8k, path: %s, limit: 400, weight: 3, format: {prompt_key: question, response_key: answer},
   default_workflow_type: math_workflow,
   curriculum: {every: 2, sql: "%s"}},
  {name: arithmetic, path: "synthetic://gsm8k", limit: 300, repeat_times: 2, epochs: 1,
   format: {prompt_key: question, response_key: answer}, default_workflow_type: math_workflow}]
"""


@pytest.mark.slow
def test_the_pipeline_begins_with_easy_tasks_and_mixes_with_another_set(
    run_pipeline: RunPipeline, tmp_path: Path, questions: Path
) -> None:
    overrides = [
        "explorer.rollout_model.engine_type=fake", "model.max_prompt_tokens=700", "buffer.batch_size=8",
        "buffer.total_steps=4", "stages.sft_warmup.buffer.total_steps=1", "monitor.monitor_type=none",
        "stages.sft_warmup.buffer.train_batch_size=4", f"buffer.explorer_input.taskset.path={questions}",
        f"buffer.explorer_input.tasksets={MORE % (questions, SQL)}",
        # the file's own set is replaced by two
        "buffer.explorer_input.taskset=null",
        f"stages.sft_warmup.buffer.trainer_input.experience_buffer.path={questions}",
    ]  # fmt: skip
    run_pipeline(ROOT / "pipelines" / "gsm8k_curriculum.yaml", tmp_path, "run", *overrides)
    job = tmp_path / "gsm8k" / "run"
    assert audit(job).ok
    with open_sql([job]) as session:
        sets = session.query(
            "select step, taskset, count(*) as groups, count(distinct task_id) as tasks "
            "from groups join tasks using (stage, task_id) group by all order by all"
        ).to_pylist()
        steps = session.query("select step, metrics from steps where stage = 'grpo'").to_pylist()
        easy = session.query(
            "select avg(scores['difficulty']) filter (groups > 0) as tried, "
            "avg(scores['difficulty']) as known from task_stats where taskset = 'gsm8k'"
        ).to_pylist()[0]
    assert {row["taskset"] for row in sets} == {"gsm8k", "arithmetic"}
    assert all(row["groups"] == row["tasks"] for row in sets)
    counts = {(row["step"], row["taskset"]): float(row["groups"]) for row in sets}
    for step in steps:
        metrics = dict(step["metrics"])
        for name in ("gsm8k", "arithmetic"):
            assert metrics[f"taskset/{name}/groups"] == counts.get((step["step"], name), 0.0)
    assert easy["tried"] < easy["known"]
