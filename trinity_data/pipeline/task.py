"""A task as the explorer sees it, and how a row of a task set becomes one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from trinity_data.config import TasksetConfig
from trinity_data.errors import ConfigError, did_you_mean
from trinity_data.pipeline.columns import Columns, columns_text
from trinity_data.schema import TASKS, content_id, rows_to_table


@dataclass(frozen=True)
class Task:
    """A prompt to try."""

    task_id: str
    taskset: str
    prompt: str
    messages: tuple[Mapping[str, str], ...]
    answer: str
    workflow: str
    reward_fn: str
    columns: Mapping[str, Any] = Columns()
    """Every column of the task set's row by name. Read-only."""


def tasks_from_table(rows: pa.Table) -> list[Task]:
    """Rows of the `tasks` table as tasks."""
    names = ["task_id", "taskset", "prompt", "messages", "answer", "workflow", "reward_fn", "columns"]
    return [
        Task(**row | {"messages": tuple(row["messages"] or ()), "columns": Columns(row["columns"] or "{}")})
        for row in rows.select(names).to_pylist()
    ]


def build_task_rows(
    config: TasksetConfig,
    rows: pa.Table,
    *,
    stage: str,
    source: str,
    source_rows: list[int],
    first_position: int,
) -> pa.Table:
    """Rows of a task set as the `tasks` table, followed by the set's own columns for operators that read them."""
    _check_columns(config, rows, source)
    records = [
        _task_row(config, row, stage, source, source_row, first_position + i)
        for i, (row, source_row) in enumerate(zip(rows.to_pylist(), source_rows, strict=True))
    ]
    table = rows_to_table("tasks", records)
    for name in rows.column_names:
        if name not in table.column_names:
            table = table.append_column(name, rows[name])
    return table


def task_columns(rows: pa.Table) -> pa.Table:
    """Only the columns of the schema."""
    return rows.select(TASKS.names)


def _task_row(
    config: TasksetConfig, row: dict[str, Any], stage: str, source: str, source_row: int, position: int
) -> dict[str, object]:
    form = config.format
    messages = _messages(config, row)
    answer = str(row.get(form.response_key) or "")
    prompt = messages[-1]["content"] if messages else ""
    return {
        "task_id": content_id(config.name, messages, answer),
        "stage": stage,
        "taskset": config.name,
        "split": config.split,
        "source": source,
        "source_row": source_row,
        "position": position,
        "prompt": prompt,
        "messages": messages,
        "answer": answer,
        "workflow": _chosen(row, form.workflow_key) or config.default_workflow_type or "math_workflow",
        "reward_fn": _chosen(row, form.reward_fn_key) or config.default_reward_fn_type or "",
        "columns": columns_text(row),
        "scores": None,
        "kept": True,
        "dropped_by": "",
    }


def _messages(config: TasksetConfig, row: dict[str, Any]) -> list[dict[str, str]]:
    form = config.format
    if form.prompt_type == "messages":
        return [{"role": str(m["role"]), "content": str(m["content"])} for m in row[form.messages_key]]
    system = _chosen(row, form.system_prompt_key) or form.system_prompt
    start = [{"role": "system", "content": system}] if system else []
    return [*start, {"role": "user", "content": str(row[form.prompt_key])}]


def _chosen(row: dict[str, Any], key: str | None) -> str | None:
    return str(row[key]) if key and row.get(key) else None


def _check_columns(config: TasksetConfig, rows: pa.Table, source: str) -> None:
    form = config.format
    wanted = form.messages_key if form.prompt_type == "messages" else form.prompt_key
    if wanted not in rows.column_names:
        raise ConfigError(
            f"taskset {config.name!r}: {source} has no column {wanted!r}; it has {', '.join(rows.column_names)}"
            f"{did_you_mean(wanted, rows.column_names)}; set format.prompt_key (or format.messages_key)"
        )
