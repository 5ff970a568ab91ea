"""Rows as Data-Juicer's samples, and what its operators change as columns of ours.

Data-Juicer keeps a sample's statistics in a dict `__dj__stats__` and what its taggers find in `__dj__meta__`.
Here numbers of both are scores; the whole of `__dj__meta__` travels as a column of JSON to the operators
behind, and a text among the statistics as a column under its own name.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from trinity_data.dataset.task import OF_THE_TASK
from trinity_data.errors import OperatorError
from trinity_data.schema import EXPERIENCES, TASKS, Values
from trinity_operators.base import Column

STATS, META = "__dj__stats__", "__dj__meta__"
"""`data_juicer.utils.constant.Fields`, whose import would bring in the whole package."""

Samples: TypeAlias = dict[str, list[Any]]
"""By the names of columns, as Data-Juicer's batched operators take them."""


class Changes:
    """What an operator made of samples: `columns` and `added` as a mapper returns them."""

    def __init__(self) -> None:
        self.columns: dict[str, Column] = {}
        self.added: dict[str, Column] = {}


def aliases(args: Mapping[str, Any], rows: pa.Table) -> dict[str, str]:
    """The names under which an operator looks for texts where no argument says otherwise, each with the
    column that is meant: the text, the query and the response of a task or an experience.
    """
    # pyarrow makes the list of names anew whenever it is read
    names = rows.column_names
    chosen = {} if "text_key" in args else {"text": default_text_key(names)}
    is_experience = "response_text" in names
    queries = {} if is_experience or "query_key" in args else {"query": "prompt"}
    responses = {} if "response_key" in args else {"response": "response_text" if is_experience else "answer"}
    for name, column in (queries | responses).items():
        if name not in names and column in names:
            chosen[name] = column
    return chosen


def default_text_key(names: Collection[str]) -> str:
    """The text of a row with columns of these names: an experience's response, a task's prompt."""
    for name in ("response_text", "prompt", "text"):
        if name in names:
            return name
    raise OperatorError(
        f"no text_key is given, and the rows have neither response_text nor prompt: {[*names]}"
    )


def samples_of(args: Mapping[str, Any], rows: pa.Table) -> Samples:
    """The rows as Data-Juicer wants them. Token lists stay behind unless an argument names them."""
    named = set(names_in(args))
    samples: Samples = {}
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        if pa.types.is_map(column.type):
            samples[name] = [None if entry is None else dict(entry) for entry in column.to_pylist()]
        elif name in named or not (
            pa.types.is_list(column.type) and pa.types.is_primitive(column.type.value_type)
        ):
            samples[name] = column.to_pylist()
    for alias, meant in aliases(args, rows).items():
        samples[alias] = [text or "" for text in samples[meant]]
    if META in samples:
        samples[META] = [json.loads(text or "{}") for text in samples[META]]
    if STATS in named:
        samples[STATS] = stats_of(rows)
    return samples


def stats_of(rows: pa.Table) -> list[dict[str, Any]]:
    """The scores of each row, and its columns of text, as Data-Juicer keeps statistics."""
    scores = [
        name
        for name, kind in zip(rows.schema.names, rows.schema.types, strict=True)
        if pa.types.is_float64(kind) or (pa.types.is_string(kind) and name not in _OURS)
    ]
    stats = rows.select(scores).to_pylist()
    return [{name: value for name, value in row.items() if value is not None} for row in stats]


def names_in(value: Any) -> Iterator[str]:
    """The columns that arguments may name, as the first part of a dotted name."""
    if isinstance(value, str):
        yield value.split(".")[0]
    elif isinstance(value, Mapping):
        yield from names_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from names_in(part)


def one_by_one(samples: Mapping[str, Sequence[Any]]) -> Iterable[dict[str, Any]]:
    names = list(samples)
    return (dict(zip(names, values, strict=True)) for values in zip(*samples.values(), strict=True))


def together(samples: Sequence[Mapping[str, Any]]) -> Samples:
    """Samples as lists by name; None where a sample lacks the name."""
    names = dict.fromkeys(name for sample in samples for name in sample)
    return {name: [sample.get(name) for sample in samples] for name in names}


def numbers(dicts: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Every entry that is a number in some row; NaN in a row without it."""
    names = dict.fromkeys(name for each in dicts for name, value in each.items() if _is_number(value))
    return {
        name: [float(each[name]) if _is_number(each.get(name)) else np.nan for each in dicts]
        for name in names
    }


def others(dicts: Sequence[Mapping[str, Any]]) -> dict[str, Values]:
    """Every entry that is no number in any row, as text or JSON."""
    names = dict.fromkeys(name for each in dicts for name in each)
    values = {name: [each.get(name) for each in dicts] for name in names}
    return {name: as_column(each) for name, each in values.items() if not any(map(_is_number, each))}


def as_column(values: Sequence[Any]) -> Values:
    """Texts and lists of texts as they are, everything else as JSON."""
    plain = [value.tolist() if isinstance(value, np.ndarray | np.generic) else value for value in values]
    known = [value for value in plain if value is not None]
    if all(isinstance(value, str) for value in known):
        return pa.array(plain, pa.string())
    if all(isinstance(value, list) and all(isinstance(each, str) for each in value) for value in known):
        return pa.array(plain, pa.list_(pa.string()))
    return pa.array([None if value is None else as_json(value) for value in plain], pa.string())


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=_plain)


def changes_of(
    rows: pa.Table, names: Mapping[str, str], before: Mapping[str, list[Any]], after: Mapping[str, list[Any]]
) -> Changes:
    """The text first, then what else differs: scores of new numbers, other columns under their names.

    `names` are the aliases; `before` holds for every sample of `after` what it was.
    """
    changes = Changes()
    for name in sorted(after, key=lambda name: name != "text"):
        values, column = after[name], names.get(name, name)
        if name == META:
            changes.columns.update(numbers([value or {} for value in values]))
            if any(values):
                changes.added[META] = pa.array([as_json(value or {}) for value in values], pa.string())
        elif name == STATS or (name in names and name not in before):
            continue
        elif name not in before:
            _add_new(changes, name, values)
        elif (name == "text" or values != before[name]) and column in rows.column_names:
            _replace(changes, rows, column, values)
    return changes


def _add_new(changes: Changes, name: str, values: list[Any]) -> None:
    if all(value is None or _is_number(value) for value in values):
        changes.columns[name] = [np.nan if value is None else float(value) for value in values]
    elif name not in _OURS:
        changes.added[name] = as_column(values)


def _replace(changes: Changes, rows: pa.Table, column: str, values: list[Any]) -> None:
    """Texts and floats where they are; another column of the set's own as one that was added."""
    kind = rows.schema.field(column).type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        changes.columns[column] = [value if value is None else str(value) for value in values]
    elif pa.types.is_floating(kind):
        changes.columns[column] = values
    elif column not in _OURS:
        changes.added[column] = as_column(values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating)


def _plain(value: Any) -> Any:
    """numpy's values as JSON has them; text for what JSON does not have."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


_OURS: Collection[str] = frozenset({*OF_THE_TASK, *TASKS.names, *EXPERIENCES.names})
