"""Rules about where the tasks of a set come from, of the kind of contradictions.py."""

from __future__ import annotations

from collections.abc import Iterator

from trinity_data.config.base import KeyPath
from trinity_data.config.buffer import TasksetConfig
from trinity_data.config.defaults import SQL_SCHEMES
from trinity_data.config.diagnostics import Diagnostic
from trinity_data.config.run import StageConfig

_ONLY_WITH: dict[str, tuple[str, ...]] = {
    "subset_name": ("file",),
    "split": ("file",),
    "streaming": ("file",),
    "on_bad_row": ("file", "queue"),
    "limit": ("file", "sql"),
    "shuffle": ("file", "sql"),
    "query": ("sql",),
    "order_by": ("sql",),
}
"""The storage types with which a key has an effect."""


def keys_of_task_sets_have_an_effect(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    for path, taskset in file_stage.buffer.explorer_input.all_tasksets():
        for name, allowed in _ONLY_WITH.items():
            if name in taskset.model_fields_set and taskset.storage_type not in allowed:
                others = " or ".join(map(repr, allowed))
                text = (
                    f"has no effect with storage_type {taskset.storage_type!r}, only with {others}; remove it"
                )
                yield Diagnostic((*path, name), text)


def a_database_is_asked_in_an_order(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    for path, taskset in stage.buffer.explorer_input.all_tasksets():
        yield from _missing_parts_of_a_query(path, taskset)


def _missing_parts_of_a_query(path: KeyPath, taskset: TasksetConfig) -> Iterator[Diagnostic]:
    if taskset.storage_type != "sql":
        if taskset.path.startswith(SQL_SCHEMES):
            text = (
                f"found {taskset.path!r} with storage_type {taskset.storage_type!r}; write storage_type: sql"
            )
            yield Diagnostic((*path, "storage_type"), text)
        return
    if not taskset.query:
        yield Diagnostic((*path, "query"), "missing; write the table of the tasks, or SQL that selects them")
    if not taskset.order_by:
        text = "missing; a database gives its rows in no order of its own; write a column that numbers them"
        yield Diagnostic((*path, "order_by"), text)


def a_stream_is_tried_as_it_comes(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    explorer_input = stage.buffer.explorer_input
    path: KeyPath = ("buffer", "explorer_input", "eval_tasksets")
    for index, taskset in enumerate(explorer_input.eval_tasksets):
        if taskset.streaming:
            text = "found true in a set to evaluate on, which is read as a whole; remove it, and write limit"
            yield Diagnostic((*path, index, "streaming"), text)
    for place, taskset in explorer_input.train_tasksets():
        if not taskset.streaming:
            continue
        if not taskset.is_streamed and taskset.has_no_end:
            text = (
                "found true with a selector or curriculum that chooses from the whole set; write limit, or "
                "remove it"
            )
            yield Diagnostic((*place, "streaming"), text)
        if stage.buffer.total_steps is None and _has_schedule(stage):
            text = (
                "missing; a streamed set has no number of tasks that the schedule of the learning rate could"
            )
            yield Diagnostic(("buffer", "total_steps"), f"{text} follow")


def _has_schedule(stage: StageConfig) -> bool:
    """Whether the learning rate follows from the number of steps."""
    optimizer = stage.algorithm.optimizer
    return optimizer.lr_scheduler_type != "constant" or bool(optimizer.lr_warmup_steps_ratio)


def a_queue_is_tried_as_it_comes(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    explorer_input, path = stage.buffer.explorer_input, ("buffer", "explorer_input", "eval_tasksets")
    for index, taskset in enumerate(explorer_input.eval_tasksets):
        if taskset.storage_type == "queue":
            text = "found 'queue', which has no end that an evaluation could wait for; allowed: file, sql"
            yield Diagnostic((*path, index, "storage_type"), text)
    for place, taskset in explorer_input.train_tasksets():
        if taskset.storage_type != "queue":
            continue
        if not taskset.is_streamed:
            text = "found 'queue', from which no selector or curriculum can choose before it has ended"
            yield Diagnostic((*place, "storage_type"), f"{text}; remove task_selector and curriculum")
        if stage.buffer.total_steps is None and _has_schedule(stage):
            text = (
                "missing; a queue has no number of tasks that the schedule of the learning rate could follow"
            )
            yield Diagnostic(("buffer", "total_steps"), text)


def what_is_written_to_files_is_read_from_somewhere_that_ends(
    file_stage: StageConfig, stage: StageConfig
) -> Iterator[Diagnostic]:
    pipeline, path = stage.data_processor.task_pipeline, ("data_processor", "task_pipeline")
    taskset = stage.buffer.explorer_input.taskset
    if taskset is None or pipeline.output is None or taskset.storage_type == "file":
        return
    if taskset.storage_type == "queue":
        text = "found output of a task set that is a queue, which has no end at which it could be written"
        yield Diagnostic((*path, "output"), f"{text}; remove it")
    elif pipeline.inputs:
        text = "found inputs of a task set with storage_type 'sql'; write storage_type: file, or remove them"
        yield Diagnostic((*path, "inputs"), text)


TASKSET_RULES = (
    keys_of_task_sets_have_an_effect,
    a_database_is_asked_in_an_order,
    a_queue_is_tried_as_it_comes,
    a_stream_is_tried_as_it_comes,
    what_is_written_to_files_is_read_from_somewhere_that_ends,
)
