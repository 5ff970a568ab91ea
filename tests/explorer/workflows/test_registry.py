"""What is found wrong with workflows, reward functions and their arguments before a run begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trinity_explorer.workflows.registry import WorkflowSpec, build_workflow, check_workflow

OWN = """
class NoRun: ...

class Plain:
    def run(self, task, model): ...

class Short:
    async def run(self, task): ...

class Turns:
    def __init__(self, reward_fn, *, max_turns: int = 2):
        self.reward_fn, self.max_turns = reward_fn, max_turns
    async def run(self, task, model): ...

def make(reward_fn):
    return NoRun()

def reward(text, answer, *, weight: float): ...

def for_trl(prompts, completions, **columns): ...

NUMBER = 3
"""


@pytest.fixture
def spec(tmp_path: Path) -> Any:
    (tmp_path / "own.py").write_text(OWN)

    def spec(workflow: str, reward_fn: str = "", **args: dict[str, Any]) -> WorkflowSpec:
        return WorkflowSpec(workflow, reward_fn, base_dir=str(tmp_path), **args)

    return spec


@pytest.mark.parametrize(
    ("fields", "key", "problem"),
    [
        ({"workflow": "math_workflw"}, "default_workflow_type", "(did you mean 'math_workflow'?)"),
        ({"workflow": "math_workflow", "reward_fn": "math_rewrd"}, "default_reward_fn_type",
         "unknown reward function 'math_rewrd'; known: "),
        ({"workflow": "math_workflow", "workflow_args": {"x": 1}}, "workflow_args",
         "workflow 'math_workflow': it takes no arguments, found 'x'"),
        ({"workflow": "math_workflow", "reward_fn_args": {"format_wight": 1}}, "reward_fn_args",
         "(did you mean 'format_weight'?)"),
        ({"workflow": "math_workflow", "reward_fn_args": {"format_weight": "much"}}, "reward_fn_args",
         "format_weight: found 'much'"),
        ({"workflow": "./own.py:NoRun"}, "default_workflow_type",
         "it has no method 'run'; write `async def run(self, task, model)`"),
        ({"workflow": "./own.py:Plain"}, "default_workflow_type", "its method 'run' is not async"),
        ({"workflow": "./own.py:Short"}, "default_workflow_type", "cannot be called with a task and a model"),
        ({"workflow": "./own.py:Trns"}, "default_workflow_type", (
            "./own.py has no 'Trns' (did you mean "
            "'Turns'?)")),
        ({"workflow": "./own.py:NUMBER"}, "default_workflow_type", "is 3 (int); a class with"),
        ({"workflow": "./none.py:X"}, "default_workflow_type", "there is no file './none.py'"),
        ({"workflow": "./own.py:Turns", "workflow_args": {"max_turn": 3}}, "workflow_args",
         "(did you mean 'max_turns'?)"),
        ({"workflow": "math_workflow", "reward_fn": "./own.py:reward"}, "reward_fn_args",
         "argument 'weight' is missing"),
        ({"workflow": "math_workflow", "reward_fn": "./own.py:Turns"}, "reward_fn_args",
         "it is the class 'Turns'; name a function"),
        ({"workflow": "math_workflow", "reward_fn": "./own.py:NUMBER"}, "reward_fn_args", "it is 3 (int)"),
    ],
)  # fmt: skip
def test_it_is_reported_with_its_key(spec: Any, fields: dict[str, Any], key: str, problem: str) -> None:
    problems = check_workflow(spec(**fields))
    assert any(at == key and problem in text for at, text in problems), problems


@pytest.mark.parametrize(
    "fields",
    [
        {"workflow": "math_boxed_workflow", "reward_fn_args": {"with_think": True}},
        {"workflow": "./own.py:Turns", "workflow_args": {"max_turns": 3}},
        {"workflow": "math_workflow", "reward_fn": "./own.py:reward", "reward_fn_args": {"weight": 2.0}},
        {"workflow": "math_workflow", "reward_fn": "./own.py:for_trl"},
        {"workflow": "code_workflow", "reward_fn_args": {"tests_column": "tests"}},
    ],
)
def test_what_fits_is_not_complained_about(spec: Any, fields: dict[str, Any]) -> None:
    assert check_workflow(spec(**fields)) == []


def test_arguments_and_the_reward_function_reach_the_constructor(spec: Any) -> None:
    workflow: Any = build_workflow(spec("./own.py:Turns", "math_reward", workflow_args={"max_turns": 5}))
    assert workflow.max_turns == 5
    assert workflow.reward_fn.name == "math_reward"


@pytest.mark.parametrize(
    ("fields", "pure"),
    [
        ({"workflow": "math_workflow"}, True),
        ({"workflow": "math_workflow", "reward_fn": "./own.py:reward"}, False),
        ({"workflow": "./own.py:Turns"}, False),
        # it waits for a process
        ({"workflow": "code_workflow"}, False),
    ],
)
def test_only_what_is_ours_and_does_not_wait_runs_in_the_runs_process(
    spec: Any, fields: dict[str, Any], pure: bool
) -> None:
    assert spec(**fields).is_pure is pure
