"""The configurations a run has had: each on record from the step at which it came into force.

A resume is compared with the last one before anything is written,
so that a run never goes on as another than it says.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from trinity_data.config import RunConfig, StageConfig
from trinity_data.config.run import TRAINER
from trinity_data.errors import ConfigError
from trinity_data.launch.configuration_changes import (
    Acceptance,
    Change,
    Recorded,
    StageProgress,
    changes,
    disagreements,
    without_names,
)
from trinity_data.launch.digests import inputs_of, package_versions
from trinity_data.launch.several_explorers import explorer_disagreements, needs_one_explorer
from trinity_data.progress import stage_done_key, tasks_key
from trinity_data.schema import content_id, rows_to_table
from trinity_data.store.protocol import WritableStore
from trinity_data.store.types import Commit

log = logging.getLogger(__name__)

EVENT = "configuration_changed"


@dataclass(frozen=True)
class Configurations:
    """The one in force, and under which one each step was trained."""

    current: str
    by_id: dict[str, Recorded]
    by_step: dict[int, str]
    changes: tuple[Change, ...] = ()
    """What is otherwise than at the start before."""

    def stage_at(self, stage: str, step: int) -> StageConfig | None:
        """A stage as it was when `step` was trained; None when that was under the one in force, or never."""
        identifier = self.by_step.get(step, self.current)
        if identifier == self.current or identifier not in self.by_id:
            return None
        stage_data = self.by_id[identifier].stages().get(stage)
        return None if stage_data is None else StageConfig.model_validate(stage_data)


def take_configuration(
    config: RunConfig, store: WritableStore, *, accept_changes: bool = False
) -> Configurations:
    """Records the configuration the run goes on under, and each change as an event.

    Raises a ConfigError that lists what may not change,
    and then writes nothing. A branch may change what asks for consent.
    """
    now = Recorded(config.public_dump(), inputs_of(config), package_versions())
    identifier = content_id(without_names(now.config), now.inputs, now.packages)
    run, rows = f"{config.project}/{config.name}", store.table("configurations").to_pylist()
    recorded = [_recorded(row) for row in rows]
    by_id = {row["configuration"]: each for row, each in zip(rows, recorded, strict=True)}
    steps = store.table("steps", columns=["step", "stage", "configuration"]).to_pylist()
    next_step = max((row["step"] for row in steps), default=0) + 1
    differences: list[Change] = []
    if not accept_changes:
        _check_that_parts_agree(config, now, recorded)
    # explorer and trainer in processes of their own have a file each
    rows = [row for row, each in zip(rows, recorded, strict=True) if each.part in (now.part, "")]
    if rows:
        was = by_id[rows[-1]["configuration"]]
        differences = changes(was, now, _progress(store, was, steps))
        consents = accept_changes or rows[-1]["run_name"] != run
        forbidden = (Acceptance.NEVER,) if consents else (Acceptance.NEVER, Acceptance.ASKS)
        if refused := [each for each in differences if each.acceptance in forbidden]:
            raise _refusal(config, refused, next_step)
    if not rows or (rows[-1]["configuration"], rows[-1]["run_name"]) != (identifier, run):
        _record(store, identifier, run, next_step, now, differences)
    by_step = {row["step"]: row["configuration"] for row in steps}
    return Configurations(identifier, by_id | {identifier: now}, by_step, tuple(differences))


def _check_that_parts_agree(config: RunConfig, now: Recorded, recorded: Sequence[Recorded]) -> None:
    """Raises a ConfigError where this file and the last one of another part contradict each other."""
    others = {each.part: each for each in recorded if each.part not in (now.part, "")}
    lines = [line for other in others.values() for line in disagreements(now, other)] if now.part else []
    if now.part not in ("", TRAINER):
        lines += _among_explorers(config, now, [others[part] for part in others if part != TRAINER])
    if lines:
        todo = (
            "write the same in both files; with --accept-changes this one begins, and the other is to follow"
        )
        raise ConfigError(
            "\n".join(
                [
                    f"{config.file}: the files of this run contradict each other:",
                    *(f"  {line}" for line in lines),
                    todo,
                ]
            )
        )


def _among_explorers(config: RunConfig, now: Recorded, others: Sequence[Recorded]) -> list[str]:
    lines = [line for other in others for line in explorer_disagreements(now, other)]
    files = {each.part: _only_stage(each) for each in (now, *others)} if others else {}
    for part, stage in files.items():
        for line in needs_one_explorer(stage, config.file.parent):
            lines.append(f"{line} in the file of {part}: this run has {len(files)} explorers")
    endpoints = [part for part, stage in files.items() if stage.serves]
    if len(endpoints) > 1:
        lines.append(
            f"mode: serve in the files of {' and '.join(endpoints)}: a task's sessions are compared with "
            "each other, and so belong to one endpoint; give it more engines (rollout_model.engine_num)"
        )
    return lines


def _only_stage(recorded: Recorded) -> StageConfig:
    (stage,) = recorded.stages().values()
    return StageConfig.model_validate(stage)


def reopen_last_stage(config: RunConfig, store: WritableStore, configurations: Configurations) -> None:
    """A run that has ended goes on where its last stage is now to be longer."""
    stage = config.stages[-1]
    done = store.stage_ended_at(stage.stage_name)
    if done is None:
        return
    ends = [store.stage_ended_at(each.stage_name) for each in config.stages[:-1]]
    first_step = int(ends[-1]) + 1 if ends and ends[-1] is not None else 1
    last_step = first_step + stage.buffer.total_steps - 1 if stage.buffer.total_steps else None
    lengthened = any(
        each.stage == stage.stage_name and each.key in ("buffer.total_steps", "buffer.total_epochs")
        for each in configurations.changes
    )
    if (last_step is None and lengthened) or (last_step is not None and last_step > int(done)):
        message = f"goes on after step {done}" + (f" to step {last_step}" if last_step else "")
        log.info("stage %s %s", stage.stage_name, message)
        reopened = Commit(progress={stage_done_key(stage.stage_name): None})
        store.log_event(stage.stage_name, int(done) + 1, "stage_reopened", message, commit=reopened).result()


def _refusal(config: RunConfig, refused: Sequence[Change], next_step: int) -> ConfigError:
    if config.stages[0].evaluates_only:
        head = f"{config.file}: the evaluations in {config.job_dir} were made otherwise:"
        todo = "put it back as it was, or give the stage a name of its own: `stages: [{stage_name: NAME}]`"
        return ConfigError("\n".join([head, *(f"  {each}" for each in refused), todo]))
    lines = [f"{config.file}: {config.job_dir} was begun otherwise, and would go on from step {next_step}:"]
    lines += [f"  {each}" for each in refused]
    todo = "put it back as it was, or give the run another `name` to start anew"
    if all(each.acceptance is Acceptance.ASKS for each in refused):
        todo += "; with --accept-changes the run goes on with it, and records it as an event"
    elif any(each.acceptance is Acceptance.ASKS for each in refused):
        keys = ", ".join(each.key for each in refused if each.acceptance is Acceptance.ASKS)
        todo += f"; --accept-changes is enough for {keys}"
    return ConfigError("\n".join([*lines, todo]))


def _record(
    store: WritableStore,
    identifier: str,
    run: str,
    next_step: int,
    now: Recorded,
    differences: Sequence[Change],
) -> None:
    at = datetime.now(UTC)
    row: dict[str, object] = {
        "configuration": identifier,
        "at": at,
        "run_name": run,
        "first_step": next_step,
        "config": json.dumps(now.config),
        "inputs": json.dumps(now.inputs),
        "packages": json.dumps(now.packages),
    }
    events: list[dict[str, object]] = [
        {"at": at, "stage": each.stage, "step": next_step, "kind": EVENT, "message": str(each)}
        for each in differences
    ]
    for each in differences:
        log.warning("from step %d on: %s", next_step, each)
    tables = {"configurations": rows_to_table("configurations", [row])}
    store.commit(Commit(tables=tables | ({"events": rows_to_table("events", events)} if events else {})))


def _recorded(row: dict[str, Any]) -> Recorded:
    return Recorded(*(json.loads(row[name]) for name in ("config", "inputs", "packages")))


def _progress(
    store: WritableStore, was: Recorded, steps: Sequence[dict[str, Any]]
) -> dict[str, StageProgress]:
    progress: dict[str, StageProgress] = {}
    is_followed = False
    # from the last stage to the first
    for name, stage in reversed(was.stages().items()):
        groups = store.table("groups", columns=["group_id"], stage=name)
        has_rows = groups.num_rows > 0 or any(store.counts(stage=name).values())
        if stage["mode"] == "bench":
            has_rows = store.table("evals", columns=["step"], stage=name).num_rows > 0
        # the tasks of a stage are read while one before it trains
        explorer_input = stage["buffer"]["explorer_input"]
        tasksets = [each for each in (explorer_input["taskset"], *explorer_input["tasksets"]) if each]
        has_read = any(store.progress(tasks_key(name, each["name"])) is not None for each in tasksets)
        progress[name] = StageProgress(
            has_begun=has_rows or has_read,
            is_done=store.stage_ended_at(name) is not None,
            is_followed=is_followed,
            num_trained=sum(row["stage"] == name for row in steps),
        )
        is_followed |= has_rows
    return progress
