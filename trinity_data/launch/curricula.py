"""What keeps the tasks of a stage from being chosen, found before the run: queries that cannot be asked, and
features that no task has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trinity_data.config import StageConfig, TasksetConfig
from trinity_data.config.base import KeyPath
from trinity_data.config.diagnostics import Diagnostic
from trinity_data.errors import ConfigError, StoreError, did_you_mean
from trinity_data.launch.data import known_columns
from trinity_data.schema import STORED
from trinity_data.store.snapshot import Snapshot, StoreVersion
from trinity_data.store.sql import SqlSession
from trinity_data.store.task_stats import before_step
from trinity_data.store.views import quoted
from trinity_explorer.curriculum.history import check_columns
from trinity_operators.base import Operator


def choice_diagnostics(
    stage: StageConfig, operators: Sequence[Operator], *, look_at_machine: bool
) -> Iterator[Diagnostic]:
    """Of every task set to train on. `operators` are those of the task pipeline."""
    for path, taskset in stage.buffer.explorer_input.train_tasksets():
        if taskset.curriculum is not None and (text := query_problem(taskset)):
            yield Diagnostic((*path, "curriculum", "sql"), text)
        if look_at_machine:
            yield from _missing_features((*path, "task_selector", "feature_keys"), taskset, operators)


def query_problem(taskset: TasksetConfig) -> str:
    """Why the query of a task set gives no weights; empty where it does. Asked of a store without rows."""
    assert taskset.curriculum is not None
    sql = taskset.curriculum.sql
    where = before_step(1, stage="", taskset=taskset.name, explorer="", trained=0)
    try:
        with SqlSession({"run": empty_snapshot()}, None, "1GB", 1, where=where) as session:
            answer = session.query(sql)
            unsteady = unsteady_functions(session, sql)
        check_columns(answer.schema, ConfigError)
    except (StoreError, ConfigError) as error:
        return str(error)
    if unsteady:
        names = ", ".join(f"{name}()" for name in unsteady)
        return (
            f"calls {names}, which answers differently when it is asked again, but tasks are the same after "
            "a restart; leave it out: tasks are drawn at random by their weights"
        )
    return ""


def empty_snapshot() -> Snapshot:
    """Of a store without rows."""
    no_rows = {name: schema.empty_table().replace_schema_metadata(None) for name, schema in STORED.items()}
    return Snapshot(
        Path(), StoreVersion(0, {}), [], sealed={name: [] for name in STORED}, hot=no_rows, damaged=[]
    )


def unsteady_functions(session: SqlSession, sql: str) -> list[str]:
    """Functions that the query calls and whose answers depend on more than their arguments."""
    (tree,) = session.query(f"SELECT json_serialize_sql({quoted(sql)}) AS tree")["tree"].to_pylist()
    rows = session.query("SELECT function_name FROM duckdb_functions() WHERE stability <> 'CONSISTENT'")
    return sorted(_functions(json.loads(str(tree))) & set(rows["function_name"].to_pylist()))


def _functions(tree: Any) -> set[str]:
    """Names of functions in a parsed query."""
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    names = {name for part in parts for name in _functions(part)}
    return names | {tree["function_name"]} if isinstance(tree, dict) and "function_name" in tree else names


def _missing_features(
    path: KeyPath, taskset: TasksetConfig, operators: Sequence[Operator]
) -> Iterator[Diagnostic]:
    columns = known_columns(taskset)
    if columns is None or any(operator.writes_more for operator in operators):
        return
    names = [*columns, *(name for operator in operators for name in operator.writes)]
    for key in taskset.task_selector.feature_keys:
        if key not in names:
            text = f"{taskset.path} has no column {key!r}, and no task operator writes it; known: "
            yield Diagnostic(path, f"{text}{', '.join(dict.fromkeys(names))}{did_you_mean(key, names)}")
