"""Names that only a registry knows: operators, workflows, reward functions.

Registries lie above the configuration, so whoever starts a run hands their names in. `package.module:Class` and
`./file.py:Class` pass: they are looked up when they are loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from trinity_data.config.complaints import Complaints
from trinity_data.config.problems import KeyPath
from trinity_data.config.run import RunConfig, StageConfig
from trinity_data.errors import unknown_name


def check_operators(config: RunConfig, known_names: Collection[str]) -> None:
    """Raises a ConfigError that lists every operator no registry knows."""
    complaints = Complaints(config.source)
    for index, stage in numbered_stages(config):
        for pipeline in ("task_pipeline", "experience_pipeline"):
            for position, operator in enumerate(getattr(stage.data_processor, pipeline).operators):
                path = ("data_processor", pipeline, "operators", position, "name")
                _check(complaints, "operator", operator.name, known_names, path, index)
    if complaints:
        raise complaints.error()


def check_workflows(config: RunConfig, workflows: Collection[str], reward_fns: Collection[str]) -> None:
    """Raises a ConfigError that lists every workflow and reward function no registry knows."""
    complaints = Complaints(config.source)
    for index, stage in numbered_stages(config):
        tasksets = stage.buffer.explorer_input.all_tasksets() if stage.mode == "both" else ()
        for path, taskset in tasksets:
            workflow, reward_fn = taskset.default_workflow_type, taskset.default_reward_fn_type
            _check(complaints, "workflow", workflow, workflows, (*path, "default_workflow_type"), index)
            _check(
                complaints, "reward function", reward_fn, reward_fns, (*path, "default_reward_fn_type"), index
            )
    if complaints:
        raise complaints.error()


def _check(
    complaints: Complaints,
    what: str,
    name: str | None,
    known: Collection[str],
    path: KeyPath,
    stage: int | None,
) -> None:
    if name is not None and ":" not in name and name not in known:
        complaints.add(path, unknown_name(what, name, known), stage=stage)


def numbered_stages(config: RunConfig) -> Iterator[tuple[int | None, StageConfig]]:
    """Stages with their number in the file; none in a file without `stages`."""
    staged = bool(config.source.data.get("stages"))
    for index, stage in enumerate(config.stages):
        yield (index if staged else None), stage
