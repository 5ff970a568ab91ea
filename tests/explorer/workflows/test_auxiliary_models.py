"""Workflows ask the stage's auxiliary models by name, and nothing that those say is an experience."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.explorer.conftest import SAMPLING
from trinity_data.config import ExplorerConfig
from trinity_data.dataset.task import Task
from trinity_data.tokenizer import ChatTemplate
from trinity_explorer.chat import RequestBatcher
from trinity_explorer.engine_model import EngineModel
from trinity_explorer.engines.fake import FakeEngine
from trinity_explorer.engines.pool import EnginePool
from trinity_explorer.rollout import Group, RolloutRunner, Row
from trinity_explorer.workflows.pool import WorkflowPool
from trinity_explorer.workflows.process import ProcessSettings
from trinity_explorer.workflows.registry import WorkflowSpec, check_workflow


def spec(name: str) -> WorkflowSpec:
    return WorkflowSpec(
        "./referees.py:Referee", workflow_args={"name": name}, base_dir=str(Path(__file__).parent)
    )


@pytest.fixture(scope="module")
def rows(tokenizer: Any) -> dict[str, list[Row]]:
    """Of rollouts whose workflow asks for `grader`, for `graber`, and for `grader` where there is none."""
    template = ChatTemplate(tokenizer, None, max_prompt_tokens=128, truncate=False)
    messages = ({"role": "user", "content": "What is 3 + 4?"},)
    task = Task("t", "sums", "What is 3 + 4?", messages, "#### 7", "", "")

    def engines(answer: str) -> EnginePool:
        return EnginePool([FakeEngine(tokenizer, script=lambda prompt, seed: answer)])

    async def go() -> dict[str, list[Row]]:
        policy, config = engines("7"), ExplorerConfig(max_retry_times=0)
        grader = {"grader": EngineModel(engines("0.25"), template)}
        async with WorkflowPool(ProcessSettings()) as workflows:

            async def rollout(name: str, models: dict[str, EngineModel]) -> list[Row]:
                workflow = workflows.get(spec(name))
                runner = RolloutRunner(
                    config, policy, template, lambda task: workflow, seed=1, auxiliary_models=models
                )
                group = Group("g", "rl", 1, 0, task, 0, 0, 1)
                return await runner.run(
                    group, 0, batcher=RequestBatcher(policy), sampling=SAMPLING, source={}
                )

            asked = [("grader", grader), ("graber", grader), ("grader", {})]
            named, misspelt, alone = await asyncio.gather(*(rollout(*each) for each in asked))
            return {"named": named, "misspelt": misspelt, "alone": alone}

    return asyncio.run(go())


def test_the_answer_of_an_auxiliary_model_decides_the_reward_and_is_no_experience(
    rows: dict[str, list[Row]],
) -> None:
    turns = rows["named"]
    assert [(row["response_text"], row["reward"], row["error"]) for row in turns] == [("7", 0.25, "")] * 2


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("misspelt", "explorer.auxiliary_models: unknown auxiliary model 'graber'; known: grader"),
        ("alone", "there is no auxiliary model 'grader': explorer.auxiliary_models has none"),
    ],
)
def test_a_model_that_is_not_there_is_the_error_of_the_rollout(
    rows: dict[str, list[Row]], case: str, error: str
) -> None:
    (row,) = rows[case]
    assert str(row["error"]).startswith(error)


def test_a_workflow_that_takes_auxiliary_models_is_accepted() -> None:
    assert check_workflow(spec("grader")) == []
