"""Rules about which tasks come when, of the kind of contradictions.py."""

from __future__ import annotations

from collections.abc import Iterator

from trinity_data.config.base import KeyPath
from trinity_data.config.buffer import TasksetConfig
from trinity_data.config.diagnostics import Diagnostic, show
from trinity_data.config.run import StageConfig

NUM_FEATURES = {"offline_easy2hard": (1, 100), "difficulty_based": (2, 2)}
"""Fewest and most `feature_keys` of the selectors that have any."""
_INPUT: KeyPath = ("buffer", "explorer_input")


def there_are_tasks_to_train_on(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    explorer_input = file_stage.buffer.explorer_input
    if explorer_input.taskset and explorer_input.tasksets:
        yield Diagnostic((*_INPUT, "tasksets"), "found both taskset and tasksets; keep one of them")
    elif stage.explores and not stage.serves and not list(stage.buffer.explorer_input.train_tasksets()):
        text = f"missing; mode {stage.mode!r} explores tasks; write a taskset with a path"
        yield Diagnostic((*_INPUT, "taskset"), text)
    elif stage.evaluates_only and not explorer_input.eval_tasksets:
        text = "missing; mode 'bench' evaluates a model on them; write a list of task sets with their paths"
        yield Diagnostic((*_INPUT, "eval_tasksets"), text)


def a_task_set_has_one_order(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    for (path, taskset), written in zip(
        stage.buffer.explorer_input.train_tasksets(), written_tasksets(file_stage), strict=True
    ):
        names = [name for name in ("task_selector", "data_selector") if name in written.model_fields_set]
        key = names[-1] if names else "task_selector"
        if len(names) == 2 and written.task_selector != written.data_selector:
            text = "differs from task_selector; they mean the same; keep one of them"
            yield Diagnostic((*path, key), text)
        if written.curriculum is not None and names:
            text = "has no effect beside curriculum, whose weights choose the tasks; keep one of them"
            yield Diagnostic((*path, key), text)
            continue
        yield from _shuffle_fits(path, taskset, written)
        yield from _selector_fits((*path, key), taskset)


def written_tasksets(stage: StageConfig) -> tuple[TasksetConfig, ...]:
    """The task sets to train on as the file gives them."""
    explorer_input = stage.buffer.explorer_input
    return (explorer_input.taskset,) if explorer_input.taskset else explorer_input.tasksets


def _shuffle_fits(path: KeyPath, taskset: TasksetConfig, written: TasksetConfig) -> Iterator[Diagnostic]:
    if "shuffle" not in written.model_fields_set:
        return
    if not taskset.is_streamed:
        chosen = (
            "curriculum" if taskset.curriculum else f"selector_type {taskset.task_selector.selector_type!r}"
        )
        yield Diagnostic(
            (*path, "shuffle"), f"has no effect with {chosen}, which chooses every task; remove it"
        )
    elif written.shuffle != (taskset.task_selector.selector_type == "shuffle"):
        kind = taskset.task_selector.selector_type
        text = f"found {show(written.shuffle)} with selector_type {kind!r}; keep one of them"
        yield Diagnostic((*path, "shuffle"), text)


def _selector_fits(path: KeyPath, taskset: TasksetConfig) -> Iterator[Diagnostic]:
    selector = taskset.task_selector
    kind, num_keys = selector.selector_type, len(selector.feature_keys)
    fewest, most = NUM_FEATURES.get(kind, (0, 0))
    if not most and num_keys:
        text = (
            f"has no effect with selector_type {kind!r}; remove it, or write selector_type: offline_easy2hard"
        )
        yield Diagnostic((*path, "feature_keys"), text)
    elif num_keys < fewest:
        wanted = (
            "two columns with the pass rates of a weaker and a stronger model"
            if most == 2
            else "columns with numbers, high for easy tasks"
        )
        yield Diagnostic((*path, "feature_keys"), f"found {num_keys} with {kind!r}; write {wanted}")
    elif num_keys > most:
        text = f"found {num_keys} with {kind!r}, which takes {most}: of a weaker and a stronger model"
        yield Diagnostic((*path, "feature_keys"), text)
    if "kwargs" in selector.model_fields_set and kind != "difficulty_based":
        text = f"has no effect with selector_type {kind!r}, only with 'difficulty_based'; remove it"
        yield Diagnostic((*path, "kwargs"), text)


def mixing_has_several_task_sets(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    explorer_input = file_stage.buffer.explorer_input
    sets = list(zip(stage.buffer.explorer_input.train_tasksets(), written_tasksets(file_stage), strict=True))
    if len(sets) == 1 and "mix" in explorer_input.model_fields_set:
        yield Diagnostic((*_INPUT, "mix"), "has no effect with one task set; write tasksets, or remove it")
    for (path, _), written in sets:
        if "weight" not in written.model_fields_set:
            continue
        if len(sets) == 1:
            text = "has no effect with one task set; write tasksets, or remove it"
        elif explorer_input.mix == "in_turn":
            text = "has no effect with mix: in_turn; write mix: weighted, or remove it"
        else:
            continue
        yield Diagnostic((*path, "weight"), text)


def evaluations_take_every_task(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    for index, written in enumerate(file_stage.buffer.explorer_input.eval_tasksets):
        for name in ("task_selector", "data_selector", "curriculum", "epochs", "weight"):
            if name in written.model_fields_set:
                text = "has no effect in an evaluation, which takes every task; remove it"
                yield Diagnostic((*_INPUT, "eval_tasksets", index, name), text)


SELECTION_RULES = (
    there_are_tasks_to_train_on,
    a_task_set_has_one_order,
    mixing_has_several_task_sets,
    evaluations_take_every_task,
)
