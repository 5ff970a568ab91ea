"""Rows on which an operator is tested: made here, or read from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from trinity_data.dataset.files import first_rows
from trinity_data.errors import ConfigError
from trinity_data.schema import TABLES, experience_id, group_id, rows_to_table
from trinity_operators.base import Expander, Operator
from trinity_operators.checks import as_array
from trinity_operators.registry import OPERATORS
from trinity_operators.runner import RowKind

ID_COLUMNS: Mapping[RowKind, str] = {"task": "task_id", "experience": "experience_id"}
MOST_ROWS = 10_000
"""Of a file."""

_TABLES: Mapping[RowKind, str] = {"task": "tasks", "experience": "experiences"}
_REWARDS = ((0.0, 1.0, 0.0, 1.0), (1.0, 1.0, 1.0, 1.0), (0.5, 0.0, 1.0, 0.25))
"""Of the rollouts of each group."""


def row_kind_of(operator: Operator) -> RowKind:
    """Which rows an operator is for, by what it declares; experiences where either would do."""
    tasks, experiences = set(TABLES["tasks"].names), set(TABLES["experiences"].names)
    if operator.whole_groups or operator.whole_steps or operator.after_advantage:
        return "experience"
    if isinstance(operator, Expander) or any(name not in experiences for name in operator.reads):
        return "task" if not {*operator.reads} & (experiences - tasks) else "experience"
    return "experience"


def made_rows(kind: RowKind, reads: Sequence[str] = ()) -> pa.Table:
    """Twelve rows, of experiences three groups of four rollouts, with the columns `reads` besides.

    Such a column holds floats where it is a score of ours or of experiences, else text.
    """
    records = [*map(_task, range(12))]
    if kind == "experience":
        records = [
            _experience(position, rollout, reward)
            for position, rewards in enumerate(_REWARDS)
            for rollout, reward in enumerate(rewards)
        ]
    rows = rows_to_table(_TABLES[kind], records)
    scores = {name for operator in OPERATORS.values() for name in operator.writes}
    for name in reads:
        if name not in rows.column_names:
            is_score = kind == "experience" or name in scores
            values = [n / rows.num_rows if is_score else f"{name} {n}" for n in range(rows.num_rows)]
            rows = rows.append_column(name, as_array(values))
    return rows


def read_rows(file: Path, kind: RowKind) -> pa.Table:
    """The first rows of a file, with ids where they have none. Raises ConfigError for what cannot be read."""
    if not file.is_file():
        raise ConfigError(f"there is no file {str(file)!r}")
    columns, records = first_rows(file, MOST_ROWS)
    if not records:
        raise ConfigError(f"{file} holds no rows")
    schema = TABLES[_TABLES[kind]]
    arrays: dict[str, pa.Array[Any]] = {}
    for name in columns:
        values = [record.get(name) for record in records]
        column_type = schema.field(name).type if name in schema.names else None
        if column_type is not None and pa.types.is_map(column_type):
            values = [[*value.items()] if isinstance(value, Mapping) else value for value in values]
        try:
            arrays[name] = _array(values, column_type)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ConfigError(f"{file}: column {name!r}: {error}") from error
    if ID_COLUMNS[kind] not in arrays:
        arrays[ID_COLUMNS[kind]] = pa.array([f"row-{number:05}" for number in range(len(records))])
    return pa.table(arrays)


def _array(values: Sequence[Any], column_type: pa.DataType | None) -> pa.Array[Any]:
    """Times may be text, as `sql --format json` writes them."""
    if column_type is not None and pa.types.is_timestamp(column_type):
        texts = [None if value is None else str(value) for value in values]
        return pa.array(texts, pa.string()).cast(column_type)
    return pa.array(values, type=column_type)


def _task(number: int) -> dict[str, object]:
    # of two tasks the same is asked
    bought = 2 if number == 8 else number
    total = 2 * bought + 2
    prompt = f"Ann has {bought + 2} apples and buys {bought} more. How many apples does she have?"
    return {
        "task_id": f"task-{number:02}",
        "stage": "test",
        "taskset": "sample",
        "split": "train",
        "source": "sample",
        "source_row": number,
        "position": number,
        "prompt": prompt,
        "messages": [{"role": "user", "content": prompt}],
        "answer": f"{bought + 2} + {bought} = <<{bought + 2}+{bought}={total}>>\n#### {total}",
        "workflow": "math_workflow",
        "reward_fn": "math_reward",
        "columns": "{}",
    }


def _experience(position: int, rollout: int, reward: float) -> dict[str, object]:
    task, group = _task(position), group_id("explorer", "test", 1, position)
    # rollout 1 says what rollout 0 does, and rollout 2 the same in every group
    said, added = 0 if rollout == 1 else rollout, 0 if rollout == 2 else position
    length = 2 + 3 * said + added
    return {
        "experience_id": experience_id(group, rollout),
        "task_id": task["task_id"],
        "group_id": group,
        "stage": "test",
        "step": 1,
        "position": position,
        "rollout": rollout,
        "turn": 0,
        "attempt": 0,
        "explorer": "explorer",
        "engine": "fake",
        "seed": 100 * position + rollout,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_tokens": 64,
        "model_version": 0,
        "prompt_length": 3,
        "response_length": length,
        "token_ids": [5, 6, 7, *(10 + (n * (said + 1)) % 7 for n in range(length))],
        "logprobs": [-0.1 * (1 + (n + rollout) % 5) for n in range(length)],
        "action_mask": [True] * length,
        "messages": [{"role": "user", "content": task["prompt"]}],
        "response_text": f"{said} and {added} make {said + added}.\n#### {said + added}",
        "reward": reward,
        "reward_parts": [("answer", reward)],
        "metrics": [("accuracy", float(reward > 0.5))],
        "info": "{}",
        "truncated": "response" if rollout == 3 else "",
        "error": "",
        "seconds": 0.5,
        "tools": None,
    }
