"""The pipeline file on chosen tasks, small, on GSM8K's own text where it lies beside the project: what each
of its operators recorded.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import trinity_data
from tests.launch.conftest import RunPipeline
from trinity_data.launch.check import load_checked
from trinity_data.schema import values_of
from trinity_data.tokenizer import ChatTemplate, load_tokenizer

FILE = Path(__file__).parents[2] / "pipelines" / "gsm8k_tasks.yaml"
SMALL = (
    "buffer.total_steps=1",
    "buffer.batch_size=4",
    "explorer.rollout_model.engine_type=fake",
    "data_processor.task_pipeline.top_k=20",
    # rows of the training split, so that some tasks are in the evaluation set
    "buffer.explorer_input.eval_tasksets.0.split=train[:8]",
    "project=tests",
)


@pytest.fixture(scope="module")
def run(run_pipeline: RunPipeline, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = f"buffer.explorer_input.taskset.path={questions}"
    return run_pipeline(FILE, tmp_path_factory.mktemp("chosen"), "tasks", path, *SMALL)


def rows_of(run: Path, query: str) -> list[dict[str, Any]]:
    return values_of(trinity_data.open(run).sql(query).arrow())


def test_token_lengths_are_of_the_stages_tokenizer(run: Path, tiny_model: Path) -> None:
    (row,) = rows_of(run, "select prompt, scores['num_tokens'] as num_tokens from tasks where kept limit 1")
    template = ChatTemplate(load_tokenizer(str(tiny_model)), None)
    assert len(template.encode([{"role": "user", "content": row["prompt"]}]).token_ids) == row["num_tokens"]


def test_the_tasks_of_the_highest_priority_are_kept(run: Path) -> None:
    rows = rows_of(
        run,
        "select kept, scores['priority'] as priority from tasks where dropped_by in ('', 'priority_filter')",
    )
    kept = [row["priority"] for row in rows if row["kept"]]
    assert len(kept) == 20 < len(rows)
    assert min(kept) >= max(row["priority"] for row in rows if not row["kept"])


def test_contaminated_tasks_name_the_row_of_the_evaluation_set(run: Path) -> None:
    rows = rows_of(
        run, "select reason from decisions where operator = 'contamination_filter' and not kept limit 9"
    )
    assert rows
    for row in rows:
        assert re.fullmatch(r"shares words with row \d+ of gsm8k-eval", row["reason"])


def test_a_file_without_an_evaluation_set_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(trinity_data.TrinityError, match=r"operators\.2.*buffer.explorer_input.eval_tasksets"):
        load_checked(FILE, ["buffer.explorer_input.eval_tasksets=[]"])
