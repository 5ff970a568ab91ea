"""Rules about steps that end before their last groups or begin beside others, of the kind of
contradictions.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from trinity_data.config.base import KeyPath
from trinity_data.config.diagnostics import Diagnostic
from trinity_data.config.run import StageConfig

RATIO: KeyPath = ("explorer", "over_rollout", "ratio")
INFLIGHT: KeyPath = ("explorer", "max_inflight_batches")


def contracts_see_a_whole_step(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    ratio = stage.explorer.over_rollout.ratio
    for contract in stage.contracts if stage.explores and ratio else ():
        if contract.action != "warn":
            text = f"found {ratio:g} with the contract {contract.name!r}, whose action {contract.action!r}"
            text += " would not see rows of late groups"
            yield Diagnostic(RATIO, f"{text}; write action: warn, or ratio: 0")


def choices_rest_on_steps_that_are_over(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    explorer = stage.explorer
    given = {
        RATIO: (f"{explorer.over_rollout.ratio:g}", explorer.over_rollout.ratio > 0, "0"),
        INFLIGHT: (f"{explorer.max_inflight_batches}", explorer.max_inflight_batches > 1, "1"),
    }
    for taskset in stage.explored_tasksets:
        chosen = "a curriculum" if taskset.curriculum is not None else "selector_type 'difficulty_based'"
        if taskset.curriculum is None and taskset.task_selector.selector_type != "difficulty_based":
            continue
        for path, (value, is_set, off) in given.items():
            if is_set:
                text = (
                    f"found {value} with {chosen} of task set {taskset.name!r}, which chooses by the rewards"
                )
                yield Diagnostic(path, f"{text} of all groups of the steps before; write {path[-1]}: {off}")


def refills_follow_a_step_that_is_over(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    explorer = stage.explorer
    if stage.explores and explorer.max_inflight_batches > 1 and explorer.refill_rounds:
        text = (
            f"found {explorer.max_inflight_batches} with refill_rounds {explorer.refill_rounds}, whose tasks"
        )
        text += " come before those of the next step"
        yield Diagnostic(INFLIGHT, f"{text}; write max_inflight_batches: 1, or refill_rounds: 0")


EXPLORER_RULES = (
    contracts_see_a_whole_step,
    choices_rest_on_steps_that_are_over,
    refills_follow_a_step_that_is_over,
)
