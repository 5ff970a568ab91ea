"""A run whose task operators and workflow ask an auxiliary model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import trinity_data
from tests.launch.conftest import RunPipeline
from trinity_data.schema import values_of

FILE = Path(__file__).parent / "fake.yaml"
OPERATORS = """[
    {name: judge_score, args: {model: grader, score: hardness, prompt: "How hard is it: {question}"}},
    {name: llm_condition_filter, args: {condition: It is a sum., api_or_hf_model: grader}},
    {name: expression_filter, args: {condition: hardness > 3}},
]"""
HARDNESS = {"Ben": "2", "Cora": "unclear"}
"""What is said of questions that begin with them; of all others 7."""
REFEREE = """
class Referee:
    async def run(self, task, model, auxiliary_models):
        await model.chat(task.messages)
        opinion = await auxiliary_models["grader"].chat([{"role": "user", "content": "Is it right?"}])
        return float(opinion.text) / 10
"""


@pytest.fixture(scope="module")
def run(run_pipeline: RunPipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / "referee.py").write_text(REFEREE)
    # of the first fragment that is in the prompt, by the seed
    hardness = {"How hard is it: " + name: [text] for name, text in HARDNESS.items()}
    answers = {**hardness, "How hard": ["7"], "Is it right?": ["4", "8"], "": ["yes"]}
    (folder / "grader.json").write_text(json.dumps(answers))
    place = f"model_path: 'synthetic://qwen2-1m', engine_type: fake, script: {folder}/grader.json"
    return run_pipeline(
        FILE,
        folder,
        "models",
        f"explorer.auxiliary_models=[{{name: grader, {place}}}]",
        f"data_processor.task_pipeline.operators={OPERATORS}",
        f"buffer.explorer_input.taskset.default_workflow_type={folder}/referee.py:Referee",
        "data_processor.experience_pipeline.operators=[]",
        "buffer.explorer_input.eval_tasksets=[]",
        "buffer.total_steps=2",
    )


def rows_of(run: Path, query: str) -> list[dict[str, Any]]:
    return values_of(trinity_data.open(run).sql(query).arrow())


def test_tasks_are_scored_by_the_auxiliary_model_and_unreadable_answers_are_errors(run: Path) -> None:
    rows = rows_of(run, "select kept, dropped_by, scores['hardness'] as hardness from tasks")
    assert {(row["kept"], row["dropped_by"], row["hardness"]) for row in rows} == {
        (True, "", 7.0),
        (False, "expression_filter", 2.0),
        (False, "judge_score", None),
    }
    (errors,) = rows_of(
        run,
        "select count(*) filter (not kept) as dropped, "
        "count(*) filter (reason like 'error: ValueError: there is no score in the answer%') as errors "
        "from decisions where operator = 'judge_score'",
    )
    assert errors["dropped"] == errors["errors"] > 0
    (answered,) = rows_of(
        run, "select count(*) filter (not kept) as dropped, count(*) as asked from decisions "
        "where operator = 'llm_condition_filter'",
    )  # fmt: skip
    assert answered["dropped"] == 0 < answered["asked"]


def test_the_workflow_is_rewarded_by_the_auxiliary_model(run: Path) -> None:
    rows = rows_of(run, "select distinct reward, error from experiences where stage = 'grpo' order by reward")
    assert [(row["reward"], row["error"]) for row in rows] == [(0.4, ""), (0.8, "")]
