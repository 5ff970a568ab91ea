"""Rollouts made elsewhere as the rows of a run: tasks, groups and experiences, to be asked,
exported and trained from.

Nothing is guessed: a column is used because the mapping names it, and what a file does not say stays empty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trinity_data.atomic import new_folder
from trinity_data.dataset.reader import DatasetSpec, Source
from trinity_data.dataset.row import Message, UnusableRow, as_written, prompt_messages, system_first
from trinity_data.errors import ConfigError, StoreError, did_you_mean, unknown_name
from trinity_data.schema import content_id, experience_id, group_id, rows_to_table
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_data.tokenizer import ChatTemplate

ENGINE = "imported"
STEP = 0
"""Imported rows come before every training step."""
FIELDS = ("prompt", "system", "answer", "response", "reward", "explorer", "error")
_EVERY = "*."
_COMMIT_GROUPS = 500

Row = dict[str, Any]


@dataclass(frozen=True)
class ColumnMapping:
    """Which column is what.

    `response=*.text` takes the field `text` of every column that has it, one rollout each.
    """

    columns: Mapping[str, str]

    @classmethod
    def parse(cls, pairs: Sequence[str]) -> ColumnMapping:
        """From `field=column`; without a pair a field is the column of its own name."""
        given: dict[str, str] = {}
        for pair in pairs:
            name, _, column = pair.partition("=")
            if name not in FIELDS or not column:
                why = (
                    f"found {pair!r}; wanted FIELD=COLUMN"
                    if name in FIELDS
                    else unknown_name("field", name, FIELDS)
                )
                raise ConfigError(f"--map: {why}")
            given[name] = column
        return cls({"prompt": "prompt", "response": "response"} | given)


@dataclass
class _Group:
    """The rollouts of one task, over all files."""

    task: Row
    rollouts: list[Row] = field(default_factory=list)


@dataclass(frozen=True)
class Imported:
    """What was brought in."""

    folder: Path
    num_tasks: int
    num_experiences: int
    num_rewarded: int


def import_experiences(
    files: Sequence[Path],
    to: Path,
    *,
    mapped: ColumnMapping,
    stage: str = "imported",
    taskset: str | None = None,
    tokenizer: Any | None = None,
) -> Imported:
    """Makes the job folder `to`, whole or not at all.

    Without a tokenizer the rows have text and no tokens.
    """
    if to.exists():
        raise StoreError(
            f"{to} exists already; imported rollouts get a folder of their own, which `sql` can join"
        )
    groups = _read_groups(files, mapped, taskset)
    with new_folder(to) as partial:
        _store(partial / "store", list(groups.values()), stage, tokenizer)
    rollouts = [row for group in groups.values() for row in group.rollouts]
    return Imported(to, len(groups), len(rollouts), sum(row["reward"] is not None for row in rollouts))


def _read_groups(files: Sequence[Path], mapped: ColumnMapping, taskset: str | None) -> dict[str, _Group]:
    """Groups by task, in order of first appearance."""
    groups: dict[str, _Group] = {}
    for file in files:
        if not file.is_file():
            raise ConfigError(f"there is no file {str(file)!r}; wanted are jsonl, json, parquet or csv files")
        source = Source(DatasetSpec(str(file), None, "train"))
        columns = source.columns([name.removeprefix(_EVERY) for name in mapped.columns.values()])
        nothing = dict.fromkeys(columns)
        sample = [nothing | row for row in source.rows(range(min(100, source.num_rows)))]
        names = _rollout_columns(columns, sample, mapped, file)
        for number, found in enumerate(source.rows(range(source.num_rows))):
            record = nothing | found
            task = _task(record, mapped, taskset or files[0].stem, file, number)
            group = groups.setdefault(task["task_id"], _Group(task | {"position": len(groups)}))
            group.rollouts += _rollouts(record, mapped, names, {"source": str(file), "row": number})
    if not groups:
        raise ConfigError(f"{', '.join(map(str, files))}: no rows")
    return groups


def _rollout_columns(columns: list[str], sample: list[Row], mapped: ColumnMapping, file: Path) -> list[str]:
    """For `*.field` the columns that have the fields; nothing otherwise.

    Refuses a mapping that the file does not fit.
    """
    wanted = {
        key: column.removeprefix(_EVERY)
        for key, column in mapped.columns.items()
        if column.startswith(_EVERY)
    }
    for key, column in mapped.columns.items():
        if key not in wanted and column not in columns:
            raise ConfigError(
                f"{file}: no column {column!r} for {key!r}; "
                f"there are {', '.join(columns)}{did_you_mean(column, columns)}; "
                f"name it with --map {key}=COLUMN"
            )
    if not wanted:
        return []
    found = [
        name
        for name in columns
        if any(isinstance(row[name], dict) and row[name].keys() >= set(wanted.values()) for row in sample)
    ]
    if not found:
        raise ConfigError(
            f"{file}: no column has the fields {', '.join(wanted.values())} that --map asks for"
        )
    return found


def _task(record: Row, mapped: ColumnMapping, taskset: str, file: Path, number: int) -> Row:
    messages = _prompt(record, mapped, file, number)
    answer = _named(record, mapped, "answer")
    answer = as_written(answer) or ""
    return {
        "task_id": content_id(taskset, messages, answer),
        "taskset": taskset,
        "source": str(file),
        "source_row": number,
        "prompt": messages[-1]["content"],
        "messages": messages,
        "answer": answer,
        "workflow": "",
        "reward_fn": "",
        "kept": True,
        "dropped_by": "",
    }


def _prompt(record: Row, mapped: ColumnMapping, file: Path, number: int) -> list[Message]:
    column = mapped.columns["prompt"]
    try:
        messages = prompt_messages(record[column], column)
    except UnusableRow as error:
        raise ConfigError(f"{file}, row {number}: {error}; a prompt is text or a list of messages") from None
    return system_first(as_written(_named(record, mapped, "system")), messages)


def _named(record: Row, mapped: ColumnMapping, key: str) -> Any:
    column = mapped.columns.get(key)
    return None if column is None or column.startswith(_EVERY) else record[column]


def _rollouts(record: Row, mapped: ColumnMapping, names: list[str], origin: Row) -> Iterator[Row]:
    """One for each column of `names`, or for each item of a list, or the row itself."""
    if names:
        for name in names:
            if record[name] is not None:
                fields = {key: _field(record, name, column) for key, column in mapped.columns.items()}
                yield _try(fields | {"explorer": fields.get("explorer") or name}, origin | {"column": name})
        return
    fields = {key: record[column] for key, column in mapped.columns.items()}
    if not isinstance(fields["response"], list):
        yield _try(fields, origin)
        return
    for number, response in enumerate(fields["response"]):
        one = {
            key: _item(value, number, fields["response"]) for key, value in fields.items() if key != "prompt"
        }
        yield _try(one | {"response": response}, origin | {"item": number})


def _field(record: Row, name: str, column: str) -> Any:
    return record[name].get(column.removeprefix(_EVERY)) if column.startswith(_EVERY) else record[column]


def _item(value: Any, number: int, responses: list[Any]) -> Any:
    """The value of one of several responses; a single value counts for all of them."""
    return value[number] if isinstance(value, list) and len(value) == len(responses) else value


def _try(fields: Row, origin: Row) -> Row:
    response, error = fields["response"], fields.get("error")
    return {
        "explorer": str(fields.get("explorer") or ENGINE),
        "response_text": None if response is None else str(response),
        "reward": _reward(fields.get("reward"), origin),
        "error": str(error or ("" if response is not None else "the file has no response")),
        "info": json.dumps(origin),
    }


def _reward(value: Any, origin: Row) -> float | None:
    """A label as a number: true is 1, false is 0."""
    if value is None:
        return None
    if isinstance(value, int | float):
        return None if math.isnan(value) else float(value)
    raise ConfigError(
        f"{origin['source']}, row {origin['row']}: a reward is a number, true or false; found {value!r}"
    )


def _store(root: Path, groups: list[_Group], stage: str, tokenizer: Any | None) -> None:
    store = Store.create_or_open(root)
    template = None if tokenizer is None else ChatTemplate(tokenizer, None)
    try:
        for start in range(0, len(groups), _COMMIT_GROUPS):
            part = groups[start : start + _COMMIT_GROUPS]
            rows = {
                "tasks": [group.task | {"stage": stage, "split": ""} for group in part],
                "groups": [_group_row(group, stage) for group in part],
                "experiences": [row for group in part for row in _experiences(group, stage, template)],
            }
            store.commit(Commit(tables={name: rows_to_table(name, found) for name, found in rows.items()}))
        store.seal()
    finally:
        store.close()


def _group_row(group: _Group, stage: str) -> Row:
    position = group.task["position"]
    return {
        "group_id": group_id(ENGINE, stage, STEP, position),
        "stage": stage,
        "step": STEP,
        "position": position,
        "task_id": group.task["task_id"],
        "epoch": 0,
        "repeat_times": len(group.rollouts),
        "round": 0,
    }


def _experiences(group: _Group, stage: str, template: ChatTemplate | None) -> Iterator[Row]:
    task, position = group.task, group.task["position"]
    name = group_id(ENGINE, stage, STEP, position)
    prompt = [] if template is None else template.encode(task["messages"]).token_ids
    for rollout, row in enumerate(group.rollouts):
        tokens = [] if template is None or row["error"] else template.encode_answer(row["response_text"])
        yield row | {
            "experience_id": experience_id(name, rollout),
            "task_id": task["task_id"],
            "group_id": name,
            "stage": stage,
            "step": STEP,
            "position": position,
            "rollout": rollout,
            "turn": 0,
            "attempt": 0,
            "engine": ENGINE,
            "prompt_length": len(prompt) if tokens else 0,
            "response_length": len(tokens),
            "token_ids": [*prompt, *tokens] if tokens else [],
            "logprobs": [],
            "action_mask": [True] * len(tokens),
            "messages": task["messages"],
            "truncated": "",
            "preference": "",
            "tools": "",
        }
