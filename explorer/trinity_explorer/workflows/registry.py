"""Workflows and reward functions by name, or by `package.module:object` and `./file.py:object`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from trinity_data.errors import ConfigError, unknown_name
from trinity_data.pipeline.registry import load_object
from trinity_explorer.rewards.math import REWARDS, Reward
from trinity_explorer.workflows.math import MathWorkflow
from trinity_explorer.workflows.workflow import Workflow, WorkflowFactory

WORKFLOWS: dict[str, tuple[WorkflowFactory, str]] = {
    "math_workflow": (MathWorkflow, "math_reward"),
    "math_boxed_workflow": (MathWorkflow, "math_boxed_reward"),
    "simple_workflow": (MathWorkflow, "accuracy_reward"),
}
"""Name to workflow and the reward it uses unless the task set names one."""


def build_workflow(
    name: str,
    reward_name: str,
    *,
    workflow_args: Mapping[str, Any],
    reward_args: Mapping[str, Any],
    base_dir: Path,
) -> Workflow:
    """A workflow with its reward function bound. Raises ConfigError for names and arguments that do not fit."""
    if ":" in name:
        factory, default_reward = cast(WorkflowFactory, load_object(name, base_dir)), "accuracy_reward"
    elif name in WORKFLOWS:
        factory, default_reward = WORKFLOWS[name]
    else:
        raise ConfigError(unknown_name("workflow", name, WORKFLOWS))
    reward = partial(find_reward(reward_name or default_reward, base_dir), **reward_args)
    try:
        return factory(reward, workflow_args)
    except TypeError as error:
        raise ConfigError(f"workflow {name!r}: {error}") from error


def find_reward(name: str, base_dir: Path) -> Callable[..., Reward]:
    if ":" in name:
        return cast(Callable[..., Reward], load_object(name, base_dir))
    if name not in REWARDS:
        raise ConfigError(unknown_name("reward function", name, REWARDS))
    return REWARDS[name]
