"""A task as the explorer sees it, and how a row of a task set becomes one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from trinity_data.dataset.cells import cell, check_key, columns_of
from trinity_data.dataset.prompts import Message, prompt_key_of, prompt_of
from trinity_data.dataset.row import Columns, UnreadableRow, UnusableRow, as_written, columns_text
from trinity_data.errors import ConfigError, did_you_mean
from trinity_data.schema import TABLES, TASKS, content_id, message_from_row

if TYPE_CHECKING:
    # for annotations: the processes of workflows load this module,
    # and the configuration takes most of a second
    from trinity_data.config import FormatConfig, TasksetConfig

MAX_ROW_BYTES = 4 << 20
"""A longer row is dropped on record."""
MAX_PROMPT_BYTES = 1 << 20
"""So is a longer prompt, which each of its rollouts would hold several times."""

OF_THE_TASK = ("task_id", "prompt", "messages", "images", "answer", "workflow", "reward_fn", "columns")
"""Names under which an operator finds the task that `format` makes of a row, and the whole row as JSON. Under
every other name it finds the set's own column, where there is one.
"""

_CONTENT = ("prompt", "messages", "answer", "workflow", "reward_fn", "columns")
"""Columns of `tasks` that say what the task is."""
TASK_COLUMNS = ("task_id", "taskset", *_CONTENT)
"""Columns of `tasks` that `tasks_from_table` reads."""

DEFAULT_WORKFLOW = "math_workflow"
ANSWERED_WORKFLOWS = (DEFAULT_WORKFLOW, "math_boxed_workflow")
"""Workflows whose rewards compare with the reference answer."""


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

    @classmethod
    def from_prompt(cls, prompt: str, answer: str = "", **columns: Any) -> Task:
        """A task of one user message, for unit tests of workflows and rewards."""
        messages = ({"role": "user", "content": prompt},)
        return cls("task", "taskset", prompt, messages, answer, "", "", Columns(columns_text(columns)))


@dataclass(frozen=True)
class TaskRows:
    """Rows of a task set as the `tasks` table, and what its operators may read besides."""

    tasks: pa.Table
    reasons: Sequence[str]
    """Of each row why it cannot be tried; empty where it can."""
    columns: Sequence[str]
    """Those of the set that are known from its beginning, whether these rows have them or not."""

    def for_operators(self) -> pa.Table:
        """The rows that can be tried, with the set's own columns in place of those of the same name."""
        usable = self.tasks
        if any(self.reasons):
            usable = usable.filter(pa.array([not reason for reason in self.reasons], pa.bool_()))
        return with_own_columns(usable, self.columns)


def tasks_from_table(rows: pa.Table) -> list[Task]:
    """Rows of the `tasks` table as tasks."""
    return [
        Task(
            **row
            | {
                "messages": tuple(message_from_row(message) for message in row["messages"] or ()),
                "columns": Columns(row["columns"] or "{}"),
            }
        )
        for row in rows.select(list(TASK_COLUMNS)).to_pylist()
    ]


def build_task_rows(
    config: TasksetConfig,
    rows: Iterable[Mapping[str, Any]],
    *,
    stage: str,
    source: str,
    source_rows: Sequence[int],
    first_position: int,
    columns: Sequence[str] = (),
) -> TaskRows:
    """Rows of a task set in the order of reading.

    Those that cannot be tried are among them with their reason.
    """
    contents, reasons, ids = list[dict[str, Any]](), list[str](), list[str]()
    for row, number in zip(rows, source_rows, strict=True):
        content, reason = _content(config, row)
        contents.append(content)
        reasons.append(reason)
        ids.append(task_id(config.name, number, content))
    values: dict[str, Any] = {name: [content[name] for content in contents] for name in _CONTENT}
    values |= {"task_id": ids, "source_row": source_rows}
    values |= {"position": range(first_position, first_position + len(ids))}
    same: dict[str, Any] = {"stage": stage, "taskset": config.name, "split": config.split}
    same |= {"source": source, "kept": True, "dropped_by": ""}
    return TaskRows(_tasks_table(values, same, len(ids)), reasons, columns)


def _tasks_table(values: Mapping[str, Any], same: Mapping[str, Any], num_rows: int) -> pa.Table:
    """Rows of `tasks`: some columns with a value for each, some with one for all, the others null."""
    columns = [
        pa.array(values[name] if name in values else [same.get(name)] * num_rows, kind)
        for name, kind in zip(TASKS.names, TASKS.types, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=TABLES["tasks"])


def task_id(taskset: str, source_row: int, content: Mapping[str, Any]) -> str:
    """Of what is asked and where it stands, so that rows that ask the same are two tasks."""
    return content_id(taskset, source_row, content["messages"], content["answer"])


def check_taskset(config: TasksetConfig, columns: Sequence[str], source: str) -> None:
    """Refuses a format that names a column which is not there. Raises ConfigError."""
    problems = [text for _, text in missing_columns(config, columns)]
    if problems:
        raise ConfigError(f"taskset {config.name!r}: {source} {'; '.join(problems)}")


def wanted_columns(config: TasksetConfig) -> list[str]:
    """Every column that the format names."""
    form = config.format
    keys = [prompt_key_of(form), *_row_keys(form).values(), form.response_key]
    return [name for key in keys for name in columns_of(key, ())]


def missing_columns(config: TasksetConfig, columns: Sequence[str]) -> list[tuple[str, str]]:
    """The keys of `format` that name a column which is not there, each with what is wrong."""
    form, problems = config.format, list[tuple[str, str]]()
    prompt_key = "messages_key" if form.prompt_type == "messages" else "prompt_key"
    keys = {prompt_key: prompt_key_of(form)} | _row_keys(form)
    if _needs_answer(config):
        keys["response_key"] = form.response_key
    for name, key in keys.items():
        try:
            check_key(key, columns)
        except ConfigError as error:
            problems.append((name, str(error)))
            continue
        problems += [
            (name, no_column(column, name, columns))
            for column in columns_of(key, columns)
            if column not in columns
        ]
    return problems


def no_column(column: str, key: str, columns: Sequence[str]) -> str:
    """What is wrong with the key of `format` that names the column."""
    near = did_you_mean(column, columns)
    return f"has no column {column!r}; it has {', '.join(columns)}{near}; set format.{key}"


def with_own_columns(tasks: pa.Table, columns: Sequence[str] = ()) -> pa.Table:
    """Rows of `tasks` with the columns of their set, for operators that read them; new ones come last, those
    of `columns` first.
    """
    rows = [json.loads(text or "{}") for text in tasks["columns"].to_pylist()]
    for name in dict.fromkeys([*columns, *(name for row in rows for name in row)]):
        if name in OF_THE_TASK:
            continue
        values, position = _typed([row.get(name) for row in rows]), tasks.schema.get_field_index(name)
        if position < 0:
            tasks = tasks.append_column(name, values)
        else:
            tasks = tasks.set_column(position, name, values)
    return tasks


def tasks_from_rows(rows: pa.Table, taskset: str) -> list[Task]:
    """Rows as operators see them, as the tasks that they are if no further operator changes them.

    The prompt is the last message, and what operators wrote into the set's own columns, or added, is among
    the `columns`; scores, which are floats, are not.
    """
    own = with_own_columns(rows.select(["columns"])).column_names
    names = [
        field.name
        for field in rows.schema
        if field.name not in OF_THE_TASK
        and (field.name in own or not (field.name in TASKS.names or pa.types.is_floating(field.type)))
    ]
    of_task = [name for name in OF_THE_TASK if name != "images"]
    return [_task_of(row, names, taskset) for row in rows.select([*of_task, *names]).to_pylist()]


def _task_of(row: dict[str, Any], names: Sequence[str], taskset: str) -> Task:
    text, values = row["columns"] or "{}", {name: row[name] for name in names}
    before = json.loads(text)
    # a column of several types came as text, and is as it was
    changed = {
        name: value for name, value in values.items() if as_written(value) != as_written(before.get(name))
    }
    if changed:
        text = columns_text(before | changed)
    messages = [message_from_row(message) for message in row["messages"]]
    messages[-1] |= {"content": row["prompt"]}
    texts = (row["answer"] or "", row["workflow"] or "", row["reward_fn"] or "")
    return Task(row["task_id"], taskset, row["prompt"], tuple(messages), *texts, Columns(text))


def _typed(values: list[Any]) -> pa.Array[Any]:
    """A column of the type that its values share; text where they share none."""
    array: pa.Array[Any]
    try:
        array = pa.array(values)
    except (pa.ArrowException, OverflowError):
        return pa.array([as_written(value) for value in values], pa.string())
    return array.cast(pa.string()) if pa.types.is_null(array.type) else array


def _row_keys(form: FormatConfig) -> dict[str, str]:
    """By name, keys that each row has a cell of its own for; the answer's only where the pipeline file
    writes it.
    """
    names = ["system_prompt_key", "workflow_key", "reward_fn_key"]
    names += ["response_key"] if "response_key" in form.model_fields_set else []
    return {name: key for name in names if (key := getattr(form, name))}


def _needs_answer(config: TasksetConfig) -> bool:
    form = config.format
    of_rows = form.workflow_key or form.reward_fn_key or config.default_reward_fn_type
    workflow = config.default_workflow_type or DEFAULT_WORKFLOW
    return not of_rows and workflow in ANSWERED_WORKFLOWS and "response_key" not in form.model_fields_set


def _content(config: TasksetConfig, row: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """What the task says, and why it cannot be tried."""
    form, messages, texts = config.format, list[Message](), dict[str, str]()
    columns = columns_text(row)
    if reason := row.reason if isinstance(row, UnreadableRow) else _too_large(columns):
        columns = "{}"
    else:
        try:
            keys = {"answer": form.response_key, "workflow": form.workflow_key, "reward": form.reward_fn_key}
            texts = {name: as_written(cell(key, row)) or "" for name, key in keys.items() if key}
            messages = _checked_size(prompt_of(form, row))
            _check_answer(config, row, texts["answer"])
        except UnusableRow as error:
            reason = str(error)
    return {
        "prompt": messages[-1]["content"] if messages else "",
        "messages": messages,
        "answer": texts.get("answer", ""),
        "workflow": texts.get("workflow") or config.default_workflow_type or DEFAULT_WORKFLOW,
        "reward_fn": texts.get("reward") or config.default_reward_fn_type or "",
        "columns": columns,
    }, reason


def too_large(row: Mapping[str, Any]) -> str:
    """Why a row is left out for its size; empty where it is not."""
    return _too_large(columns_text(row))


def _too_large(columns: str) -> str:
    size = len(columns.encode())
    return f"the row is of {size:,} bytes; at most {MAX_ROW_BYTES:,} are read" if size > MAX_ROW_BYTES else ""


def _checked_size(messages: list[Message]) -> list[Message]:
    size = sum(len(message["content"].encode()) for message in messages)
    if size > MAX_PROMPT_BYTES:
        raise UnusableRow(f"the prompt is of {size:,} bytes; at most {MAX_PROMPT_BYTES:,} are tried")
    return messages


def _check_answer(config: TasksetConfig, row: Mapping[str, Any], answer: str) -> None:
    """A set that has answers has one in every row; `0` and `false` are some."""
    form = config.format
    has_answers = form.response_key in row or "response_key" in form.model_fields_set or _needs_answer(config)
    if has_answers and not answer.strip():
        raise UnusableRow(f"column {form.response_key!r} holds no answer")
