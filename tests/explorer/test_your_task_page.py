"""The pages on task sets, rewards and workflows: their files make a run, their functions give the numbers,
their tables are true.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trinity_data.config import ExplorerConfig, load_pipeline_file
from trinity_data.dataset.reader import DatasetSpec, Source
from trinity_data.dataset.task import Task
from trinity_data.launch.check import check_run
from trinity_data.launch.workflows import workflow_finder
from trinity_data.tokenizer import ChatTemplate
from trinity_explorer.chat import ChatClient, RequestBatcher
from trinity_explorer.engines.engine import Sampling
from trinity_explorer.engines.fake import FakeEngine, script_from_file
from trinity_explorer.engines.pool import EnginePool
from trinity_explorer.rewards.math import math_reward
from trinity_explorer.rewards.registry import REWARDS
from trinity_explorer.rewards.reward import PLAIN_SUPPLIED
from trinity_explorer.rollout import Group, RolloutRunner, Row
from trinity_explorer.workflows.pool import WorkflowPool
from trinity_explorer.workflows.process import ProcessSettings
from trinity_explorer.workflows.registry import OWN_DEFAULT_REWARD, WORKFLOWS
from trinity_operators.task_filtering import read_for_evaluation

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("howto/task_set.md", "howto/reward.md", "howto/workflow.md", "reference/rewards.md")
PAGE = "\n".join((DOCS / page).read_text() for page in PAGES)
TASKSET = "buffer.explorer_input.taskset"

Rewards = Callable[..., list[list[Row]]]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files in an empty folder."""
    folder = tmp_path_factory.mktemp("words")
    names = ("words.jsonl", "script.json", "words.yaml", "mine.py", "turns.py", "referee.py", "test_turns.py")
    texts = (*blocks("json"), *blocks("yaml"), *blocks("python"))
    for name, text in zip(names, texts, strict=True):
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def rollouts(folder: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Rewards:
    """The rows of one rollout of each task of the page, under overrides of its pipeline file."""
    monkeypatch.chdir(folder)

    async def go(overrides: tuple[str, ...]) -> list[list[Row]]:
        config = load_pipeline_file(folder / "words.yaml", overrides)
        (stage,) = config.stages
        taskset = stage.buffer.explorer_input.taskset
        assert taskset is not None
        tasks, _ = read_for_evaluation(
            taskset, Source(DatasetSpec("words.jsonl", None, "train")), [], stage="rl"
        )
        script = script_from_file(folder / "script.json")
        engines = EnginePool([FakeEngine(tokenizer, script=script)])
        template = ChatTemplate(tokenizer, None, max_prompt_tokens=256, truncate=False)
        sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, min_tokens=0, max_tokens=64, seed=0)
        async with WorkflowPool(ProcessSettings()) as workflows:
            workflow_for = workflow_finder(workflows, stage, folder)
            limits = ExplorerConfig(max_timeout=60.0, max_retry_times=0)
            runner = RolloutRunner(limits, engines, template, workflow_for, seed=0)
            return [
                await runner.run(
                    Group(f"g/{number}", "rl", 1, number, task, 0, 0, 1),
                    0,
                    batcher=RequestBatcher(engines),
                    sampling=sampling,
                    source={},
                )
                for number, task in enumerate(tasks)
            ]

    return lambda *overrides: asyncio.run(go(overrides))


def rewards(rows: list[list[Row]]) -> list[object]:
    assert [row["error"] for rollout in rows for row in rollout] == [""] * sum(map(len, rows))
    return [pytest.approx(rollout[-1]["reward"]) for rollout in rows]


def test_the_pages_file_runs_with_the_built_in_workflow(rollouts: Rewards) -> None:
    rows = rollouts()
    # marked, not marked, and a third that is rounded
    assert rewards(rows) == [1.1, 0.9, 1.1]
    (message,) = rows[0][0]["messages"]  # type: ignore[misc]
    assert message["content"] == "Ann has 2 apples. She buys 3 more. How many has she?"


@pytest.mark.parametrize(
    ("reward", "expected"),
    [("close", [1.0, 1.0, 1.0]), ("brief", [1.1, 1.1, 0.1]), ("for_trl", [1.0, 1.0, 0.0])],
)
def test_its_reward_functions_give_what_they_say(
    rollouts: Rewards, reward: str, expected: list[float]
) -> None:
    rewarded = rewards(rollouts(f"{TASKSET}.default_reward_fn_type=./mine.py:{reward}"))
    assert rewarded == [pytest.approx(value, abs=1e-3) for value in expected]


def test_its_workflow_makes_a_row_a_turn(rollouts: Rewards) -> None:
    rows = rollouts(
        f"{TASKSET}.default_workflow_type=./turns.py:AskTwice", f"{TASKSET}.workflow_args={{turns: 3}}"
    )
    assert [len(rollout) for rollout in rows] == [3, 3, 3]
    first = rows[0]
    assert [len(list(row["messages"])) for row in first] == [1, 3, 5]  # type: ignore[call-overload]
    assert [row["response_text"] for row in first] == ["2 and 3 make 5.\n#### 5"] + ["Yes, I am.\n#### 5"] * 2
    assert [row["reward"] for row in first] == [1.0] * 3
    assert [row["temperature"] for row in first] == [1.0, 0.7, 0.7]


def test_its_unit_test_of_the_workflow_passes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    names: dict[str, Any] = {}
    exec((folder / "test_turns.py").read_text(), names)
    names["test_it_asks_again"]()


def test_its_workflow_that_asks_another_model_is_rewarded_by_it(folder: Path) -> None:
    names: dict[str, Any] = {"__name__": "referee"}
    exec((folder / "referee.py").read_text(), names)
    referee = names["Referee"]()
    model = ChatClient.of_fake_engine(FakeEngine(script=lambda prompt, seed: "5"))
    grader = ChatClient.of_fake_engine(
        FakeEngine(script=lambda prompt, seed: "Yes." if "Is 5 the answer to 2 + 3" in prompt else "No.")
    )
    task = Task.from_prompt("2 + 3 = ?", answer="5")
    assert asyncio.run(referee.run(task, model, {"grader": grader})) == 1.0
    assert len(model.replies) == 1


def test_what_the_page_names_is_found_sound_before_a_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    own = ("default_workflow_type=./turns.py:AskTwice", "default_reward_fn_type=./mine.py:close")
    args = ("workflow_args={turns: 3}", "reward_fn_args={scale: 2.0}")
    check_run(load_pipeline_file(folder / "words.yaml", [f"{TASKSET}.{each}" for each in (*own, *args)]))


def table(heading: str) -> dict[str, list[str]]:
    after = PAGE.split(heading)[1]
    lines = after[: after.index("\n\n")].splitlines()
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines if "`" in line]
    return {cell[0].strip("`"): cell[1:] for cell in cells}


def test_its_table_of_workflows_is_the_registry() -> None:
    rows = table("| workflow | asks |")
    assert rows.pop("one of yours")[-1].strip("`") == OWN_DEFAULT_REWARD
    assert {name: cells[-1].strip("`") for name, cells in rows.items()} == {
        name: reward for name, (_, reward) in WORKFLOWS.items()
    }


def test_its_table_of_rewards_has_their_arguments() -> None:
    rows = table("| reward | arguments |")
    assert set(rows) == set(REWARDS)
    for name, reward in REWARDS.items():
        parameters = list(inspect.signature(reward).parameters.values())[2:]
        real = [f"{p.name}: {str(p.default).lower()}" for p in parameters if p.name not in PLAIN_SUPPLIED]
        assert re.findall(r"`(.+?)`", rows[name][0]) == real


def test_the_four_rewards_of_math_reward_are_those_of_the_page() -> None:
    totals = [math_reward(text, "7").total for text in ("#### 7", "7", "#### 8", "8")]
    assert totals == pytest.approx([1.1, 0.9, 0.1, -0.1])
    assert "1.1, 0.9, 0.1 or -0.1" in PAGE
