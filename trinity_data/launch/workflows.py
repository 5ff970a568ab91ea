"""The workflows and reward functions of a pipeline file: what they are built from,
and whether they can be.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from trinity_data.config import RunConfig, StageConfig, TasksetConfig
from trinity_data.config.base import KeyPath
from trinity_data.config.diagnostics import Diagnostic
from trinity_data.dataset.task import DEFAULT_WORKFLOW, Task
from trinity_data.launch.data import known_columns
from trinity_explorer.rewards.registry import CODE_REWARDS, REWARD_NUMBERS
from trinity_explorer.rewards.run_code import PROTECTIONS, run_code
from trinity_explorer.workflows.pool import WorkflowPool
from trinity_explorer.workflows.process import ProcessSettings
from trinity_explorer.workflows.registry import WORKFLOWS, WorkflowSpec, check_workflow
from trinity_explorer.workflows.workflow import Workflow

CHECK_SECONDS = 120.0


def process_settings(stage: StageConfig) -> ProcessSettings:
    """What the processes of a stage's workflows are given."""
    return ProcessSettings(env=stage.explorer.env_vars, memory_bytes=stage.explorer.workflow_memory_bytes)


def workflow_finder(
    workflows: WorkflowPool, stage: StageConfig, base_dir: Path
) -> Callable[[Task], Workflow]:
    """The workflow of each task, which names it or leaves it to its task set."""
    tasksets = {taskset.name: taskset for _, taskset in stage.buffer.explorer_input.all_tasksets()}

    @cache
    def find(taskset: str, workflow: str, reward_fn: str) -> Workflow:
        return workflows.get(workflow_spec(tasksets[taskset], workflow, reward_fn, base_dir))

    return lambda task: find(task.taskset, task.workflow, task.reward_fn)


def ask_for_defaults(workflows: WorkflowPool, stage: StageConfig, base_dir: Path) -> None:
    """So that the processes of the workflows that the file names can be started before
    the first task is read.
    """
    for _, taskset in stage.buffer.explorer_input.all_tasksets():
        workflows.get(_default_spec(taskset, base_dir))


def workflow_diagnostics(stage: StageConfig, base_dir: Path) -> list[Diagnostic]:
    """What is wrong with the workflows, reward functions and arguments that a stage names.

    Code of other people is loaded in a process of its own, under a deadline.
    """
    # operators may write columns of their own
    has_operators = bool(stage.data_processor.task_pipeline.operators)
    named = [
        _Named(path, _default_spec(taskset, base_dir), None if has_operators else known_columns(taskset))
        for path, taskset in stage.tried_tasksets()
    ]
    ours = [each for each in named if ":" not in f"{each.spec.workflow}{each.spec.reward_fn}"]
    theirs = [each for each in named if each not in ours]
    diagnostics = [*_diagnostics(ours, [check_workflow(each.spec, each.columns) for each in ours])]
    if theirs:
        request = json.dumps(
            [{"spec": vars(each.spec), "columns": each.columns} for each in theirs], default=str
        )
        times = tuple(_changed_at(each.spec) for each in theirs)
        diagnostics += _diagnostics(theirs, _check_elsewhere(request, times, len(theirs)))
    return diagnostics


def reward_numbers(stage: StageConfig) -> frozenset[str] | None:
    """The metrics and reward parts that every task set of a stage gives; None where code of the user's, or a
    row, says which there are.
    """
    numbers: list[frozenset[str]] = []
    for _, taskset in stage.buffer.explorer_input.train_tasksets():
        spec = _default_spec(taskset, Path())
        of_rows = taskset.format.workflow_key or taskset.format.reward_fn_key
        if of_rows or spec.workflow not in WORKFLOWS or spec.reward_name not in REWARD_NUMBERS:
            return None
        numbers.append(REWARD_NUMBERS[spec.reward_name])
    return frozenset.union(*numbers) if numbers else None


def notes_about_code(config: RunConfig) -> Iterator[str]:
    """What this machine does not keep code from that a model wrote, where a reward runs some."""
    tasksets = [each for stage in config.stages for _, each in stage.buffer.explorer_input.all_tasksets()]
    names = {_default_spec(taskset, Path()).reward_name for taskset in tasksets}
    if names & CODE_REWARDS and (unprotected := run_code("").unprotected):
        missing = "; ".join(PROTECTIONS[name] for name in unprotected)
        yield (
            f"{config.yaml_file.file}: code_reward: this machine does not allow namespaces, "
            f"so for code that a model wrote: {missing}"
        )


@dataclass(frozen=True)
class _Named:
    """What a task set names."""

    path: KeyPath
    spec: WorkflowSpec
    columns: list[str] | None
    """Of the task set, where they are known."""


def _diagnostics(
    named: Sequence[_Named], problems: Sequence[Collection[Sequence[str]]]
) -> Iterator[Diagnostic]:
    for each, texts in zip(named, problems, strict=True):
        for key, text in texts:
            yield Diagnostic((*each.path, key), text)


def _changed_at(spec: WorkflowSpec) -> tuple[float, ...]:
    """When the files that it names were changed."""
    files = [name.rpartition(":")[0] for name in (spec.workflow, spec.reward_fn) if ".py:" in name]
    paths = [folder / file for file in files for folder in (Path(spec.base_dir), Path.cwd())]
    return tuple(path.stat().st_mtime for path in paths if path.is_file())


# a file is checked when it is loaded and again when it is run
@lru_cache(maxsize=8)
def _check_elsewhere(request: str, times: object, count: int) -> list[list[tuple[str, str]]]:
    command = [sys.executable, "-P", "-m", "trinity_explorer.workflows.process_main", "--check"]
    try:
        done = subprocess.run(command, input=request, capture_output=True, text=True, timeout=CHECK_SECONDS)
        problems: list[list[tuple[str, str]]] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return [
            [("default_workflow_type", f"loading it took more than {CHECK_SECONDS:g} s")]
            for _ in range(count)
        ]
    except ValueError:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        text = f"the process that loaded it ended with exit code {done.returncode}: {last}"
        return [[("default_workflow_type", text)] for _ in range(count)]
    return problems


def _default_spec(taskset: TasksetConfig, base_dir: Path) -> WorkflowSpec:
    workflow = taskset.default_workflow_type or DEFAULT_WORKFLOW
    return workflow_spec(taskset, workflow, taskset.default_reward_fn_type or "", base_dir)


def workflow_spec(taskset: TasksetConfig, workflow: str, reward_fn: str, base_dir: Path) -> WorkflowSpec:
    """Of a task of the set that names this workflow and this reward function."""
    return WorkflowSpec(
        workflow,
        reward_fn,
        workflow_args=taskset.workflow_args,
        reward_fn_args=taskset.reward_fn_args,
        base_dir=str(base_dir.absolute()),
        conversational=taskset.format.prompt_type == "messages",
    )
