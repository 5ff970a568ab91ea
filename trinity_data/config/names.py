"""Names that only a registry knows: workflows and reward functions; and the stages with their numbers.

Registries lie above the configuration, so whoever starts a run hands their names in. `package.module:Class` and
`./file.py:Class` pass: they are looked up when they are loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from trinity_data.config.problems import Finding
from trinity_data.config.run import RunConfig, StageConfig
from trinity_data.errors import unknown_name


def unknown_workflows(
    stage: StageConfig, workflows: Collection[str], reward_fns: Collection[str]
) -> Iterator[Finding]:
    """Every workflow and reward function of a stage's task sets that no registry knows."""
    tasksets = stage.buffer.explorer_input.all_tasksets() if stage.mode == "both" else ()
    for path, taskset in tasksets:
        workflow, reward_fn = taskset.default_workflow_type, taskset.default_reward_fn_type
        if _is_unknown(workflow, workflows):
            text = unknown_name("workflow", str(workflow), workflows)
            yield Finding((*path, "default_workflow_type"), text)
        if _is_unknown(reward_fn, reward_fns):
            text = unknown_name("reward function", str(reward_fn), reward_fns)
            yield Finding((*path, "default_reward_fn_type"), text)


def _is_unknown(name: str | None, known: Collection[str]) -> bool:
    return name is not None and ":" not in name and name not in known


def numbered_stages(config: RunConfig) -> Iterator[tuple[int | None, StageConfig]]:
    """Stages with their number in the file; none in a file without `stages`."""
    staged = bool(config.source.data.get("stages"))
    for index, stage in enumerate(config.stages):
        yield (index if staged else None), stage
