"""What the pipeline files of several explorers of one run must agree on, and what needs one alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trinity_data.config import StageConfig
from trinity_data.config.diagnostics import show
from trinity_data.launch.configuration_changes import MAY_DIFFER, Recorded, differences, fits
from trinity_data.launch.pipelines import experience_operators

_OWN = (
    *MAY_DIFFER,
    "explorer.name",
    # of an endpoint
    "mode",
    "explorer.session_timeout",
    "explorer.listen_address",
    "explorer.proxy_port",
    # compared set by set
    "buffer.explorer_input.*",
    # of the trainer, or each explorer's own end
    "buffer.total_*",
    "buffer.train*",
    "trainer.*",
)


def explorer_disagreements(ours: Recorded, other: Recorded) -> Iterator[str]:
    """Where the files of two explorers of one run say something else of what they have in common."""
    for key, mine, its in differences(ours.config["stages"][0], other.config["stages"][0]):
        if not fits(key, _OWN):
            yield _line(key, mine, its, other)
    if ours.config["seed"] != other.config["seed"]:
        yield _line("seed", ours.config["seed"], other.config["seed"], other)
    our_sets, other_sets = _tasksets(ours), _tasksets(other)
    for name in sorted(our_sets.keys() & other_sets.keys()):
        for key, mine, its in differences(our_sets[name], other_sets[name]):
            line = _line(f"task set {name!r}: {key}", mine, its, other)
            yield f"{line}; another task set needs another `name`"


def _line(key: str, mine: Any, its: Any, other: Recorded) -> str:
    return f"{key}: {show(mine)} here, {show(its)} in the file of {other.part}"


def _tasksets(recorded: Recorded) -> dict[str, Mapping[str, Any]]:
    """The task sets of an explorer by name, each with the digest of its content in place of its path."""
    ((stage_name, stage),) = recorded.stages().items()
    given = stage["buffer"]["explorer_input"]
    sections = {"taskset": given["taskset"]} | {
        f"tasksets.{number}": taskset for number, taskset in enumerate(given["tasksets"])
    }
    inputs = recorded.inputs.get(stage_name, {})
    return {
        taskset["name"]: {
            **{key: value for key, value in taskset.items() if key not in ("path", "weight")},
            "content": inputs.get(f"buffer.explorer_input.{section}.path", taskset["path"]),
        }
        for section, taskset in sections.items()
        if taskset
    }


def needs_one_explorer(stage: StageConfig, base_dir: Path) -> Iterator[str]:
    """What of a stage can be right with one explorer alone, each with what to write instead."""
    for _, taskset in stage.buffer.explorer_input.train_tasksets():
        if taskset.curriculum is not None or taskset.task_selector.selector_type == "difficulty_based":
            yield (
                f"task set {taskset.name!r}: its tasks are chosen by what all earlier steps have brought, "
                "and with several explorers some of those go on; write another task_selector, or give one "
                "explorer more engines (rollout_model.engine_num)"
            )
    for operator in experience_operators(stage, base_dir):
        if operator.keeps_state:
            yield (
                f"operator {operator.label!r}: it compares with all earlier experiences, and each explorer "
                "would see its own alone; leave it out, or give one explorer more engines "
                "(rollout_model.engine_num)"
            )
