"""Workflows and reward functions by name, or by `package.module:object` and `./file.py:object`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from trinity_data.arguments import check_arguments
from trinity_data.errors import ConfigError, unknown_name
from trinity_data.parameters import parameters_of
from trinity_explorer.rewards.registry import PURE_REWARDS, REWARDS
from trinity_explorer.rewards.reward import BoundReward, bind_reward, check_reward, is_async, shown
from trinity_explorer.workflows.workflow import MathWorkflow, Workflow
from trinity_operators.registry import load_object

WORKFLOWS: dict[str, tuple[Callable[..., Workflow], str]] = {
    "math_workflow": (MathWorkflow, "math_reward"),
    "math_boxed_workflow": (MathWorkflow, "math_boxed_reward"),
    "simple_workflow": (MathWorkflow, "accuracy_reward"),
    "code_workflow": (MathWorkflow, "code_reward"),
}
"""Name to workflow and the reward it uses unless the task set names one."""

OWN_DEFAULT_REWARD = "accuracy_reward"
"""What a workflow of the user's is given unless the task set names a reward function."""

AUXILIARY_PARAMETER = "auxiliary_models"
"""The parameter of `run` that is filled with the stage's auxiliary models, where there is one."""

REWARD_PARAMETER = "reward_fn"
"""The constructor's parameter that is filled with the reward function, where there is one."""


@dataclass(frozen=True)
class WorkflowSpec:
    """What a process needs to build a workflow with its reward function; plain data."""

    workflow: str
    reward_fn: str = ""
    """Empty: the workflow's own."""
    workflow_args: Mapping[str, Any] = field(default_factory=dict)
    reward_fn_args: Mapping[str, Any] = field(default_factory=dict)
    base_dir: str = "."
    """The folder of the pipeline file, where `./file.py` is looked for before the working directory."""
    conversational: bool = False
    """Whether prompts are lists of messages in the task set, for reward functions of TRL's kind."""

    @property
    def reward_name(self) -> str:
        """With the default filled in. Raises ConfigError for a workflow that is not known."""
        if self.reward_fn:
            return self.reward_fn
        if ":" in self.workflow:
            return OWN_DEFAULT_REWARD
        if self.workflow not in WORKFLOWS:
            raise ConfigError(unknown_name("workflow", self.workflow, WORKFLOWS))
        return WORKFLOWS[self.workflow][1]

    @property
    def is_pure(self) -> bool:
        """Whether it is all ours, and neither waits nor runs anything:
        it may run in the run's own process.
        """
        return ":" not in self.workflow and self.reward_name in PURE_REWARDS

    @property
    def label(self) -> str:
        """What messages and the log call it: whatever of it is the user's."""
        own = [name for name in (self.workflow, self.reward_fn) if ":" in name]
        return " with ".join(own) or f"{self.workflow} with {self.reward_name}"


def build_workflow(spec: WorkflowSpec) -> Workflow:
    """A workflow with its reward function bound.

    Raises ConfigError for names and arguments that do not fit.
    """
    if problems := check_workflow(spec):
        raise ConfigError("\n".join(text for _, text in problems))
    factory = _find_workflow(spec)
    arguments = dict(spec.workflow_args)
    if REWARD_PARAMETER in parameters_of(factory).by_name:
        arguments[REWARD_PARAMETER] = find_reward(spec)
    try:
        workflow = factory(**arguments)
    # the boundary to code of other people: an error of building the workflow gets its name
    except Exception as error:
        raise ConfigError(f"workflow {spec.workflow!r}: {type(error).__name__}: {error}") from error
    if problem := _run_problem(workflow):
        raise ConfigError(f"workflow {spec.workflow!r}: {problem}")
    return workflow


def find_reward(spec: WorkflowSpec) -> BoundReward:
    """The reward function with its arguments. Raises ConfigError when there is none of that name."""
    name = spec.reward_name
    return bind_reward(name, _find_reward(spec), spec.reward_fn_args, conversational=spec.conversational)


def has_async_reward(spec: WorkflowSpec) -> bool:
    """Whether its reward function waits for something. Raises ConfigError when there is none of that name."""
    return is_async(_find_reward(spec))


def check_workflow(spec: WorkflowSpec, columns: Collection[str] | None = None) -> list[tuple[str, str]]:
    """What is wrong with names, signatures and arguments: the key of the task set it is about, and the words.

    Loads the files that it names, so for code of other people it is called in a process of its own.
    """
    problems: list[tuple[str, str]] = []
    try:
        factory = _find_workflow(spec)
        checked = check_arguments(factory, spec.workflow_args, supplied=(REWARD_PARAMETER,))
        for text in checked.sentences:
            problems.append(("workflow_args", f"workflow {spec.workflow!r}: {text}"))
        if inspect.isclass(factory) and (problem := _run_problem(factory)):
            problems.append(("default_workflow_type", f"workflow {spec.workflow!r}: {problem}"))
    except ConfigError as error:
        problems.append(("default_workflow_type", str(error)))
        if not spec.reward_fn:
            return problems
    try:
        for text in check_reward(_find_reward(spec), spec.reward_fn_args, columns):
            problems.append(("reward_fn_args", f"reward function {spec.reward_name!r}: {text}"))
    except ConfigError as error:
        problems.append(("default_reward_fn_type", str(error)))
    return problems


def _find_workflow(spec: WorkflowSpec) -> Callable[..., Workflow]:
    if ":" in spec.workflow:
        factory = load_object(spec.workflow, Path(spec.base_dir))
        if not callable(factory):
            raise ConfigError(
                f"workflow {spec.workflow!r} is {shown(factory)}; a class with `async def run(self, task, "
                "model)` is allowed"
            )
        return cast(Callable[..., Workflow], factory)
    if spec.workflow not in WORKFLOWS:
        raise ConfigError(unknown_name("workflow", spec.workflow, WORKFLOWS))
    return WORKFLOWS[spec.workflow][0]


def _find_reward(spec: WorkflowSpec) -> Any:
    name = spec.reward_name
    if ":" in name:
        return load_object(name, Path(spec.base_dir))
    if name not in REWARDS:
        raise ConfigError(unknown_name("reward function", name, REWARDS))
    return REWARDS[name]


def takes_auxiliary_models(run: Callable[..., Any]) -> bool:
    """Whether the `run` of a workflow asks for the stage's auxiliary models."""
    return AUXILIARY_PARAMETER in inspect.signature(run).parameters


def _run_problem(workflow: Any) -> str | None:
    """What is wrong with the `run` of a workflow, or of its class."""
    run = getattr(workflow, "run", None)
    what = "`async def run(self, task, model)`, which returns the reward"
    if run is None:
        return f"it has no method 'run'; write {what}"
    if not inspect.iscoroutinefunction(run):
        return f"its method 'run' is not async; write {what}"
    arguments = (None, None, None) if inspect.isclass(workflow) else (None, None)
    more = {AUXILIARY_PARAMETER: None} if takes_auxiliary_models(run) else {}
    try:
        inspect.signature(run).bind(*arguments, **more)
    except TypeError as error:
        return f"its method 'run' cannot be called with a task and a model ({error}); write {what}"
    return None
