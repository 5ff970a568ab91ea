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
from trinity_data.dataset.prompts import prompt_messages, system_first
from trinity_data.dataset.reader import DatasetSpec, Source
from trinity_data.dataset.row import UnusableRow, as_written
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
_OF_EVERY_ROW = {
    "engine": ENGINE, "turn": 0, "attempt": 0, "logprobs": [], "truncated": "", "preference": "", "tools": "",
}  # fmt: skip
_COMMIT_GROUPS = 500
_SAMPLE_ROWS = 100

Row = dict[str, Any]


@dataclass(frozen=True)
class ColumnMapping:
    """Which column is what.

    `response=*.text` takes the field `text` of every column that has it, one rollout each.
    """

    columns: Mapping[str, str]

    @property
    def fields(self) -> dict[str, str]:
        """The `field` of what is mapped to `*.field`."""
        starred = ((key, name) for key, name in self.columns.items() if name.startswith(_EVERY))
        return {key: name.removeprefix(_EVERY) for key, name in starred}

    @classmethod
    def parse(cls, pairs: Sequence[str]) -> ColumnMapping:
        """From `field=column`; without a pair a field is the column of its own name."""
        columns: dict[str, str] = {}
        for pair in pairs:
            name, _, column = pair.partition("=")
            if name not in FIELDS or not column:
                why = (
                    f"found {pair!r}; wanted FIELD=COLUMN"
                    if name in FIELDS
                    else unknown_name("field", name, FIELDS)
                )
                raise ConfigError(f"--map: {why}")
            columns[name] = column
        return cls({"prompt": "prompt", "response": "response"} | columns)


@dataclass
class _Group:
    """The rollouts of one task, over all files."""

    task: Row
    rollouts: list[Row] = field(default_factory=list)

    def place(self, stage: str) -> Row:
        """The columns that a row of `groups` shares with the experiences of the group."""
        position = self.task["position"]
        return {
            "group_id": group_id(ENGINE, stage, STEP, position),
            "task_id": self.task["task_id"],
            "stage": stage,
            "step": STEP,
            "position": position,
        }


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
    for path in files:
        file = _File(path, mapped)
        for number, record in file.records():
            task = file.task(record, number, taskset or files[0].stem)
            group = groups.setdefault(task["task_id"], _Group(task | {"position": len(groups)}))
            group.rollouts += file.rollouts(record, number)
    if not groups:
        raise ConfigError(f"{', '.join(map(str, files))}: no rows")
    return groups


class _File:
    """The rows of one file under a mapping; refuses a mapping that the file does not fit."""

    def __init__(self, path: Path, mapped: ColumnMapping) -> None:
        if not path.is_file():
            raise ConfigError(f"there is no file {str(path)!r}; wanted are jsonl, json, parquet or csv files")
        self.path, self.mapping, self.fields = path, mapped.columns, mapped.fields
        self.source = Source(DatasetSpec(str(path), None, "train"))
        self.columns = self.source.columns([name.removeprefix(_EVERY) for name in self.mapping.values()])
        for key, column in self.mapping.items():
            if key not in self.fields and column not in self.columns:
                there = f"there are {', '.join(self.columns)}{did_you_mean(column, self.columns)}"
                todo = f"name it with --map {key}=COLUMN"
                raise ConfigError(f"{path}: no column {column!r} for {key!r}; {there}; {todo}")
        names = {*self.fields.values()}
        sample = [record for _, record in self.records(_SAMPLE_ROWS)] if names else []
        self.rollout_columns = [
            name
            for name in self.columns
            if any(isinstance(row[name], dict) and row[name].keys() >= names for row in sample)
        ]
        """For `*.field` those that have the fields."""
        if names and not self.rollout_columns:
            listed = ", ".join(sorted(names))
            raise ConfigError(f"{path}: no column has the fields {listed} that --map asks for")

    def records(self, limit: int | None = None) -> Iterator[tuple[int, Row]]:
        """Numbered, with null for columns that a row lacks."""
        size = self.source.num_rows if limit is None else min(limit, self.source.num_rows)
        empty = dict.fromkeys(self.columns)
        return enumerate(empty | row for row in self.source.rows(range(size)))

    def value(self, record: Row, key: str) -> Any:
        """Of a field that all rollouts of a row share; None where the mapping has none."""
        return None if key in self.fields or key not in self.mapping else record[self.mapping[key]]

    def task(self, record: Row, number: int, taskset: str) -> Row:
        column = self.mapping["prompt"]
        try:
            messages = prompt_messages(record[column], column)
        except UnusableRow as error:
            raise ConfigError(
                f"{self.path}, row {number}: {error}; a prompt is text or a list of messages"
            ) from None
        messages = system_first(as_written(self.value(record, "system")), messages)
        answer = as_written(self.value(record, "answer")) or ""
        return {
            "task_id": content_id(taskset, messages, answer),
            "taskset": taskset,
            "source": str(self.path),
            "source_row": number,
            "prompt": messages[-1]["content"],
            "messages": messages,
            "answer": answer,
            "workflow": "",
            "reward_fn": "",
            "kept": True,
            "dropped_by": "",
        }

    def rollouts(self, record: Row, number: int) -> Iterator[Row]:
        """One for each of `rollout_columns`, or for each item of a list, or the row itself."""
        origin: Row = {"source": str(self.path), "row": number}
        fields = {key: self.value(record, key) for key in self.mapping}
        for name in self.rollout_columns:
            if record[name] is not None:
                own = fields | {key: record[name].get(inner) for key, inner in self.fields.items()}
                yield _try(own | {"explorer": own.get("explorer") or name}, origin | {"column": name})
        if self.rollout_columns:
            return
        responses = fields["response"]
        if not isinstance(responses, list):
            yield _try(fields, origin)
            return
        # a list as long as the responses has one value each; a single value counts for all of them
        lists = {
            key for key, value in fields.items() if isinstance(value, list) and len(value) == len(responses)
        }
        for item in range(len(responses)):
            of_item = {key: value[item] if key in lists else value for key, value in fields.items()}
            yield _try(of_item, origin | {"item": item})


def _try(fields: Row, origin: Row) -> Row:
    """The label as a number: true is 1, false is 0."""
    response, error, reward = fields["response"], fields.get("error"), fields.get("reward")
    if not isinstance(reward, int | float | None):
        raise ConfigError(
            f"{origin['source']}, row {origin['row']}: a reward is a number, true or false; found {reward!r}"
        )
    return {
        "explorer": str(fields.get("explorer") or ENGINE),
        "response_text": None if response is None else str(response),
        "reward": None if reward is None or math.isnan(reward) else float(reward),
        "error": str(error or ("" if response is not None else "the file has no response")),
        "info": json.dumps(origin),
    }


def _store(root: Path, groups: list[_Group], stage: str, tokenizer: Any | None) -> None:
    store = Store.create_or_open(root)
    template = None if tokenizer is None else ChatTemplate(tokenizer, None)
    try:
        for start in range(0, len(groups), _COMMIT_GROUPS):
            part = groups[start : start + _COMMIT_GROUPS]
            rows = {
                "tasks": [group.task | {"stage": stage, "split": ""} for group in part],
                "groups": [
                    group.place(stage) | {"epoch": 0, "repeat_times": len(group.rollouts), "round": 0}
                    for group in part
                ],
                "experiences": [row for group in part for row in _experiences(group, stage, template)],
            }
            store.commit(Commit(tables={name: rows_to_table(name, new) for name, new in rows.items()}))
        store.seal()
    finally:
        store.close()


def _experiences(group: _Group, stage: str, template: ChatTemplate | None) -> Iterator[Row]:
    place, messages = group.place(stage), group.task["messages"]
    prompt = [] if template is None else template.encode(messages).token_ids
    for rollout, row in enumerate(group.rollouts):
        tokens = [] if template is None or row["error"] else template.encode_answer(row["response_text"])
        of_rollout = {
            "experience_id": experience_id(place["group_id"], rollout),
            "rollout": rollout,
            "prompt_length": len(prompt) if tokens else 0,
            "response_length": len(tokens),
            "token_ids": [*prompt, *tokens] if tokens else [],
            "action_mask": [True] * len(tokens),
            "messages": messages,
        }
        yield _OF_EVERY_ROW | row | place | of_rollout
