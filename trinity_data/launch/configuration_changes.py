"""What another configuration would change in a run that has begun, and which of it may change.

Rows on record were made under the old one. What they and a resume rest on never changes; what the coming
steps merely follow may, and is recorded; the rest may only where the person says that it is meant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from trinity_data.config import StageConfig
from trinity_data.config.diagnostics import show
from trinity_data.launch.digests import IDLE_IN_TRAIN, flat


class Acceptance(Enum):
    APPLIED = "applied"
    ASKS = "asks"
    NEVER = "never"


# where rows lie, not what they are
_NAMES_OF_THE_RUN = ("project", "name", "checkpoint_root_dir", "continue_from_checkpoint")
_APPLIED_OF_THE_RUN = ("monitor*", "log*", "service*", "mode", "ray_namespace")
_NEVER = (
    "mode",
    "algorithm.algorithm_type",
    "algorithm.repeat_times",
    "buffer.batch_size",
    "buffer.train_batch_size",
    "explorer.name",
    "buffer.explorer_input.taskset*",
    "buffer.explorer_input.mix",
    "buffer.trainer_input.experience_buffer.format.*",
)
# of what `_NEVER` says: what a task is tried with, which a task carries from when it was read
_ASKS = (
    "buffer.explorer_input.taskset*.rollout_args.*",
    "buffer.explorer_input.taskset*.workflow_args*",
    "buffer.explorer_input.taskset*.reward_fn_args*",
    "buffer.explorer_input.taskset*.default_*",
    "buffer.explorer_input.taskset*.curriculum.*",
)
_APPLIED = (
    "algorithm.optimizer.*",
    "cluster.*",
    "explorer.runner_per_model",
    "explorer.max_timeout",
    "explorer.dynamic_timeout.*",
    "explorer.over_rollout.*",
    "explorer.max_inflight_batches",
    "explorer.max_retry_times",
    "explorer.max_failed_steps",
    "explorer.max_dropped_steps",
    "explorer.workflow_memory_bytes",
    "explorer.env_vars*",
    "explorer.eval_*",
    "explorer.*_model*.engine_num",
    "explorer.*_model*.tensor_parallel_size",
    "explorer.*_model*.gpu_memory_utilization",
    "explorer.*_model*.enforce_eager",
    "explorer.*_model*.max_num_seqs",
    "explorer.*_model*.enable_prefix_caching",
    "explorer.rollout_model.max_logprob_diff*",
    "trainer.name",
    "trainer.save_*",
    "trainer.grad_clip",
    "trainer.use_dynamic_bsz",
    "trainer.max_token_len_per_gpu",
    "trainer.shared_prompts",
    "trainer.max_checkpoints_to_keep",
    "trainer.stop_timeout",
    "trainer.max_skipped_updates",
    "trainer.micro_batch_size_per_gpu",
    "synchronizer.sync_method",
    "synchronizer.sync_timeout",
    "data_processor.task_pipeline.operator_timeout",
    "data_processor.experience_pipeline.operator_timeout",
    "data_processor.experience_pipeline.max_error_rate",
    "data_processor.experience_pipeline.max_waiting_groups",
    "buffer.explorer_input.eval_tasksets*",
    "buffer.trainer_input.experience_buffer.name",
    "buffer.trainer_input.experience_buffer.max_read_timeout",
    "buffer.trainer_input.experience_buffer.capacity*",
    "data_processor.task_pipeline.num_process",
    "data_processor.task_pipeline.execution",
    "data_processor.*_pipeline.operators.*.concurrency",
    "data_processor.experience_pipeline.max_restarts",
    "data_processor.experience_pipeline.save_input",
    "data_processor.experience_pipeline.input_save_path",
)
# of explorer and trainer in processes of their own
_IN_COMMON = (
    "stage_name",
    "algorithm.algorithm_type",
    "model.model_path",
    "model.max_model_len",
    "synchronizer.sync_style",
)
_STALENESS, _OF_THE_TRAINER = (
    "algorithm.sample_strategy_args.max_staleness",
    "synchronizer.trainer_sync_interval",
)
_IN_COMMON_BY_STYLE = {
    "fixed": ("synchronizer.sync_interval", "synchronizer.sync_offset"),
    "explorer_driven": (_STALENESS,),
    "trainer_driven": (_STALENESS, _OF_THE_TRAINER),
    "fully_async": (_STALENESS, _OF_THE_TRAINER),
}
# the same rows, by processes that share GPUs or do not
_MODES_OF_ONE_COMMAND = {"both", "colocate"}
# a folder may have another name; its content is compared
_PATHS = (
    "model.model_path",
    "buffer.explorer_input.taskset*.path",
    "buffer.trainer_input.*.path",
)
_TASKSETS = ("buffer.explorer_input.taskset*.path",)
# what evaluations are compared by; where a task set lies is not, but its content is
_OF_AN_EVALUATION = (
    "model.*",
    "buffer.explorer_input.eval_tasksets*",
    "data_processor.task_pipeline.operators*",
    "explorer.max_timeout",
    "explorer.max_retry_times",
    "explorer.rollout_model.engine_type",
    "explorer.rollout_model.dtype",
    "explorer.rollout_model.seed",
    "explorer.rollout_model.script",
    "explorer.auxiliary_models*",
)
_PATHS_OF_AN_EVALUATION = ("model.model_path", "buffer.explorer_input.eval_tasksets*.path")
_LENGTH = ("buffer.total_steps", "buffer.total_epochs")
# carried by the tasks that were read: another one is tried with those that are read from now on
_OF_TASKS = (
    "buffer.explorer_input.taskset*.default_*",
    "*.default_workflow_type",
    "*.default_reward_fn_type",
)
# only stand-ins for other keys, which are compared themselves
_STAND_INS = (
    "trainer.total_steps",
    "buffer.default_*",
    "buffer.explorer_input.default_*",
    "model.temperature",
    "model.top_p",
    "model.top_k",
)


MAY_DIFFER = (*_APPLIED, *_STAND_INS)
"""Between explorers of one run, as between its sessions."""


@dataclass(frozen=True)
class Change:
    """One key that is not what it was."""

    stage: str
    """Empty for a key of the whole run."""
    key: str
    was: str
    now: str
    acceptance: Acceptance
    remark: str = ""

    def __str__(self) -> str:
        where = f"{self.stage}: {self.key}" if self.stage else self.key
        return f"{where}: was {self.was}, is {self.now}" + (f" ({self.remark})" if self.remark else "")


@dataclass(frozen=True)
class StageProgress:
    """How far a stage has come, which decides what may become of its keys."""

    has_begun: bool
    is_done: bool = False
    is_followed: bool = False
    """A stage after it has been tried or trained, at steps that follow from where this one ended."""
    num_trained: int = 0


@dataclass(frozen=True)
class Recorded:
    """A configuration as it is kept in the store."""

    config: Mapping[str, Any]
    inputs: Mapping[str, Mapping[str, str]]
    packages: Mapping[str, str]

    @property
    def part(self) -> str:
        """As of `RunConfig`."""
        return StageConfig.model_validate(self.config["stages"][0]).part

    def stages(self) -> dict[str, Mapping[str, Any]]:
        """Those of the run, by name and in order."""
        return {str(stage["stage_name"]): stage for stage in self.config["stages"]}


def changes(was: Recorded, now: Recorded, progress: Mapping[str, StageProgress]) -> list[Change]:
    """Every difference, in the order of the file. `progress` is of the stages that `was` has."""
    found = list[Change]()
    has_begun = any(each.has_begun for each in progress.values())
    run_was, run_now = without_names(was.config, "stages"), without_names(now.config, "stages")
    for key, before, after in differences(run_was, run_now):
        fixed = has_begun and not fits(key, _APPLIED_OF_THE_RUN)
        acceptance = Acceptance.NEVER if fixed else Acceptance.APPLIED
        found.append(Change("", key, show(before), show(after), acceptance))
    old, new = was.stages(), now.stages()
    found += _of_stage_list(list(old), list(new), progress)
    for name in new:
        if name in old:
            found += _of_stage(name, old[name], new[name], progress[name])
            inputs = was.inputs.get(name, {}), now.inputs.get(name, {})
            found += _of_inputs(name, *inputs, progress[name], evaluates=new[name]["mode"] == "bench")
    for key, before, after in differences(was.packages, now.packages):
        texts = (str(before or "none"), str(after or "none"))
        found.append(Change("", f"version of {key}", *texts, Acceptance.APPLIED))
    return found


def disagreements(ours: Recorded, other: Recorded) -> list[str]:
    """Where explorer and trainer of one run say something else of what they have in common."""
    mine, its = ours.config["stages"][0], other.config["stages"][0]
    in_common = _IN_COMMON + _IN_COMMON_BY_STYLE[mine["synchronizer"]["sync_style"]]
    return [
        f"{key}: {show(here)} here, {show(there)} in the file of {other.part}"
        for key, here, there in differences(mine, its)
        if fits(key, in_common)
    ]


def _of_stage_list(old: list[str], new: list[str], progress: Mapping[str, StageProgress]) -> Iterator[Change]:
    if old == new:
        return
    num_begun = max((number for number, name in enumerate(old, 1) if progress[name].has_begun), default=0)
    kept = old[:num_begun] == new[:num_begun]
    remark = "" if kept else f"{', '.join(old[:num_begun])}: begun, and must stay first and in this order"
    acceptance = Acceptance.APPLIED if kept else Acceptance.NEVER
    yield Change("", "stages", ", ".join(old), ", ".join(new) or "none", acceptance, remark)


def _of_stage(
    name: str, was: Mapping[str, Any], now: Mapping[str, Any], progress: StageProgress
) -> Iterator[Change]:
    for key, old, new in differences(was, now):
        idle = IDLE_IN_TRAIN if was["mode"] == now["mode"] == "train" else ()
        if fits(key, _STAND_INS + idle):
            continue
        if not progress.has_begun:
            acceptance, remark = Acceptance.APPLIED, ""
        elif now["mode"] == "bench":
            counts = fits(key, _OF_AN_EVALUATION) and not fits(key, _PATHS_OF_AN_EVALUATION)
            acceptance, remark = Acceptance.NEVER if counts else Acceptance.APPLIED, ""
        elif key in _LENGTH:
            acceptance, remark = _length_acceptance(key, old, new, was, now, progress)
        else:
            is_never = fits(key, _NEVER) and not fits(key, _ASKS)
            acceptance = Acceptance.NEVER if is_never else Acceptance.ASKS
            if fits(key, _PATHS + _APPLIED) or (key == "mode" and {old, new} == _MODES_OF_ONE_COMMAND):
                acceptance = Acceptance.APPLIED
            of_tasks = fits(key, _OF_TASKS)
            remark = "for tasks that are read from now on; those that wait keep theirs" if of_tasks else ""
        yield Change(name, key, show(old), show(new), acceptance, remark)


def _of_inputs(
    name: str,
    was: Mapping[str, str],
    now: Mapping[str, str],
    progress: StageProgress,
    *,
    evaluates: bool,
) -> Iterator[Change]:
    # a key that names another file is compared as a key
    for key in sorted(was.keys() & now.keys()):
        if was[key] == now[key]:
            continue
        remark = ""
        if evaluates and progress.has_begun:
            counts = fits(key, _OF_AN_EVALUATION)
            acceptance = Acceptance.NEVER if counts else Acceptance.APPLIED
        elif not progress.has_begun or fits(key, ("buffer.explorer_input.eval_tasksets*",)):
            acceptance = Acceptance.APPLIED
        elif fits(key, _TASKSETS):
            acceptance = Acceptance.ASKS
            remark = "tasks that were read stay as they were; rows that were not are read as they are now"
        elif fits(key, _PATHS):
            acceptance = Acceptance.NEVER
        else:
            acceptance, remark = Acceptance.ASKS, "its file, or one that it imports"
        old, new = (
            f"content {digest[:8]}" if re.fullmatch("[0-9a-f]{32}", digest) else digest
            for digest in (was[key], now[key])
        )
        yield Change(name, key, old, new, acceptance, remark)


def _length_acceptance(
    key: str, old: Any, new: Any, was: Mapping[str, Any], now: Mapping[str, Any], progress: StageProgress
) -> tuple[Acceptance, str]:
    """A stage may get longer or shorter as long as none after it has begun, but not shorter than it is."""
    if key == "buffer.total_epochs" and was["buffer"]["total_steps"] and now["buffer"]["total_steps"]:
        return Acceptance.APPLIED, "without effect beside total_steps"
    if progress.is_followed:
        return Acceptance.NEVER, "the stage after it has begun where it ended"
    shorter = new is not None and old is not None and new < old
    if key == "buffer.total_steps" and new is not None and new < progress.num_trained:
        return Acceptance.NEVER, f"{progress.num_trained} steps are trained"
    if shorter and progress.is_done:
        return Acceptance.NEVER, "the stage is done"
    return Acceptance.APPLIED, ""


def fits(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Keys with another value, with both; an absent key and an empty section are nothing."""
    old, new = dict(_filled(was)), dict(_filled(now))
    for key in dict.fromkeys([*new, *old]):
        if json.dumps(old.get(key)) != json.dumps(new.get(key)):
            yield key, old.get(key), new.get(key)


def _filled(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in flat(data) if value not in (None, {}, []))


def without_names(config: Mapping[str, Any], *more: str) -> dict[str, Any]:
    """A configuration without what the run is called and where it lies."""
    return {key: value for key, value in config.items() if key not in (*_NAMES_OF_THE_RUN, *more)}
