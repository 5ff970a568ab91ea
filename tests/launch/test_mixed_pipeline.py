"""pipelines/gsm8k_mixed.yaml at small size, with a queue as a third task set."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from ruamel.yaml import YAML

from tests.launch.conftest import RunPipeline, rows_of
from trinity_data.dataset.task_queue import TaskQueue
from trinity_data.query.audit import audit

FILE = Path(__file__).parents[2] / "pipelines" / "gsm8k_mixed.yaml"
STATISTICS = {"text_len", "num_words", "alnum_ratio", "char_rep_ratio", "special_char_ratio"}
STEPS, TASKS = 4, 8
PUSHED = [
    {"question": f"Ann has {n} apples and buys 4 more. How many?", "answer": f"{n + 4}"} for n in range(9)
]


def test_tasks_of_a_stream_a_file_and_a_queue_go_through_the_recipe_and_are_mixed(
    run_pipeline: RunPipeline, tmp_path: Path, questions: Path
) -> None:
    format_ = {"prompt_key": "question", "response_key": "answer"}
    queue = {"name": "pushed", "storage_type": "queue", "path": str(tmp_path / "queue"), "weight": 4}
    tasksets = [*YAML(typ="safe").load(FILE)["buffer"]["explorer_input"]["tasksets"], queue]
    tasksets[0]["path"], tasksets[2]["format"] = str(questions), format_
    tasks = TaskQueue(tmp_path / "queue")
    tasks.push(PUSHED)
    tasks.close()
    run_pipeline(
        FILE, tmp_path, "run", f"buffer.explorer_input.tasksets={json.dumps(tasksets)}",
        f"buffer.total_steps={STEPS}", f"buffer.batch_size={TASKS}", "monitor.monitor_type=none",
        "explorer.rollout_model.engine_type=fake", "model.max_prompt_tokens=700",
    )  # fmt: skip
    job = tmp_path / "gsm8k" / "run"
    assert audit(job).ok
    rows = rows_of(job, "select taskset, source_row, prompt, kept, scores from tasks order by position")
    assert all(dict(row["scores"]).keys() == STATISTICS for row in rows if row["kept"])
    prompts = [row["prompt"] for row in rows if row["taskset"] == "gsm8k"]
    assert all(prompt.endswith("Write each step on a line of its own.") for prompt in prompts)
    # the stream is read as far as its tasks are asked for
    assert TASKS <= len(prompts) < 400
    tried = rows_of(
        job,
        "select taskset, source_row, task_id from groups g join tasks using (stage, task_id) "
        "order by step, g.position",
    )
    assert len(tried) == len({row["task_id"] for row in tried}) == STEPS * TASKS
    counts = Counter(row["taskset"] for row in tried)
    assert counts["gsm8k"] > counts["arithmetic"] > 0
    assert [row["source_row"] for row in tried if row["taskset"] == "pushed"] == [*range(len(PUSHED))]
