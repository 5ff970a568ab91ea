"""What is found wrong with workflows and rewards before a run begins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from trinity_data.config import load_pipeline_file
from trinity_data.launch.workflows import workflow_findings

FAKE = Path(__file__).parent / "fake.yaml"

TASKSET = "buffer.explorer_input.taskset"

OWN = """
from trinity_explorer.rewards.reward import Reward

class NoRun: ...

class Plain:
    def run(self, task, model): ...

class Short:
    async def run(self, task): ...

class Turns:
    def __init__(self, reward_fn, *, max_turns: int = 2): ...
    async def run(self, task, model): ...

def reward(text, answer, *, weight: float): ...

def for_trl(prompts, completions, **columns): ...

print("what is printed while the file is loaded does no harm")
"""


@pytest.fixture
def found(tmp_path: Path, tiny_model: Path, taskset: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    (tmp_path / "own.py").write_text(OWN)

    def found(*overrides: str) -> list[str]:
        config = load_pipeline_file(FAKE, [f"{TASKSET}.path={taskset}", *overrides])
        findings = [f for stage in config.stages for f in workflow_findings(stage, tmp_path)]
        return [f"{'.'.join(map(str, f.path[-2:]))}: {f.text}" for f in findings if "taskset" in f.path]

    return found


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["default_workflow_type=math_workflw"], "unknown workflow 'math_workflw'; known: "),
        (["default_workflow_type=math_workflw"], "(did you mean 'math_workflow'?)"),
        (["default_reward_fn_type=math_rewrd"], "default_reward_fn_type: unknown reward function 'math_rewrd'; known: "),
        (["workflow_args={x: 1}"], "workflow_args: workflow 'math_workflow': it takes no arguments, found 'x'"),
        (["reward_fn_args={format_wight: 1}"], "(did you mean 'format_weight'?)"),
        (["reward_fn_args={format_weight: much}"], "format_weight: found 'much'"),
        (["default_workflow_type=./own.py:NoRun"], "it has no method 'run'; write `async def run(self, task, model)`"),
        (["default_workflow_type=./own.py:Plain"], "its method 'run' is not async"),
        (["default_workflow_type=./own.py:Short"], "its method 'run' cannot be called with a task and a model"),
        (["default_workflow_type=./own.py:Trns"], "./own.py has no 'Trns' (did you mean 'Turns'?)"),
        (["default_workflow_type=./none.py:X"], "there is no file './none.py'"),
        (["default_workflow_type=./own.py:Turns", "workflow_args={max_turn: 3}"], "(did you mean 'max_turns'?)"),
        (["default_reward_fn_type=./own.py:reward"], "argument 'weight' is missing"),
        (["default_reward_fn_type=./own.py:Turns"], "it is the class 'Turns'; name a function"),
    ],
)  # fmt: skip
def test_it_is_told_with_its_key(found: object, overrides: Sequence[str], problem: str) -> None:
    assert callable(found)
    texts = found(*(f"{TASKSET}.{each}" for each in overrides))
    assert any(problem in text for text in texts), texts


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["default_workflow_type=./own.py:Turns", "workflow_args={max_turns: 3}"],
        ["default_reward_fn_type=./own.py:reward", "reward_fn_args={weight: 2.0}"],
        ["default_reward_fn_type=./own.py:for_trl"],
        ["default_workflow_type=code_workflow", "reward_fn_args={tests_column: tests}"],
    ],
)
def test_what_fits_is_not_complained_about(found: object, overrides: Sequence[str]) -> None:
    assert callable(found)
    assert found(*(f"{TASKSET}.{each}" for each in overrides)) == []


def test_a_file_that_ends_its_process_ends_no_check(found: object, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import os\nos._exit(3)\n")
    assert callable(found)
    (text,) = found(f"{TASKSET}.default_workflow_type=./ends.py:X")
    assert "the process that loaded it ended with exit code 3" in text
