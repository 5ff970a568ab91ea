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
    "on_bad_row": ("file",),
    "query": ("sql",),
    "order_by": ("sql",),
}
"""The storage types with which a key has an effect."""


def keys_of_task_sets_have_an_effect(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    for path, taskset in stage.buffer.explorer_input.all_tasksets():
        for name, allowed in _ONLY_WITH.items():
            if name in taskset.model_fields_set and taskset.storage_type not in allowed:
                text = f"has no effect with storage_type {taskset.storage_type!r}, only with {allowed[0]!r}"
                yield Diagnostic((*path, name), f"{text}; remove it")


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


TASKSET_RULES = (keys_of_task_sets_have_an_effect, a_database_is_asked_in_an_order)
