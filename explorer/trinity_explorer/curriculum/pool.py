"""The tasks of one task set that a selector chooses from, numbered by their place in the set's order."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.dataset.task import Task, tasks_from_table
from trinity_data.errors import ConfigError, did_you_mean
from trinity_data.schema import Values

Places: TypeAlias = npt.NDArray[np.int64]
"""Numbers of tasks in their pool, from 0."""
Floats: TypeAlias = npt.NDArray[np.float64]

COLUMNS = ("task_id", "taskset", "prompt", "messages", "answer", "workflow", "reward_fn", "columns", "scores")


@dataclass(frozen=True)
class TaskPool:
    """Kept rows of `tasks`, of one stage and one task set."""

    rows: pa.Table
    """With `COLUMNS`."""
    features: Floats
    """N × K: the value of each feature key for each task."""

    @classmethod
    def from_rows(cls, rows: pa.Table, *, feature_keys: Sequence[str] = ()) -> TaskPool:
        """Of rows of `tasks`, dropped ones left out. Raises ConfigError for a feature that is no number."""
        kept = rows.filter(rows["kept"]).sort_by("position").select(list(COLUMNS))
        columns = [feature(kept, key) for key in feature_keys]
        return cls(kept, np.column_stack(columns) if columns else np.empty((kept.num_rows, 0)))

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    def tasks(self, places: Places) -> list[Task]:
        """The tasks at these places, in this order."""
        distinct, which = np.unique(places, return_inverse=True)
        # a take of few rows copies whole columns of text; a slice copies nothing
        slices = [self.rows.slice(place, 1) for place in distinct.tolist()]
        found = tasks_from_table(pa.concat_tables(slices)) if slices else []
        return [found[number] for number in which.tolist()]

    def places(self, task_ids: Values) -> Places:
        """Where tasks of these ids are; −1 for an id of another pool."""
        if 4 * len(task_ids) > len(self):
            return _index_in(task_ids, self.rows["task_id"])
        # the smaller set is the one that is hashed
        distinct: Any = pc.unique(task_ids)
        numbers = _index_in(self.rows["task_id"], distinct)
        in_pool = np.flatnonzero(numbers >= 0)
        places = np.full(len(distinct), -1, np.int64)
        places[numbers[in_pool]] = in_pool
        return places[_index_in(task_ids, distinct)]


def _index_in(values: Values, value_set: Values) -> Places:
    """Where each value is in a set; −1 where it is not."""
    found: Any = pc.index_in(values, value_set=value_set)
    numbers: Places = found.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return numbers


def feature(rows: pa.Table, key: str) -> Floats:
    """One value a task: a score that a task operator gave, or else a column of the task set.

    Raises ConfigError where a task has no finite number under the key.
    """
    scores: Any = pc.map_lookup(rows["scores"], pa.scalar(key), "first")
    if scores.null_count < len(scores):
        values: Floats = scores.to_numpy(zero_copy_only=False).astype(np.float64)
    else:
        values = np.array([_number(text, key) for text in rows["columns"].to_pylist()], np.float64)
    missing = np.flatnonzero(~np.isfinite(values))
    if len(missing):
        raise ConfigError(_without_number(rows, key, int(missing[0]), len(missing)))
    return values


def _number(columns: str | None, key: str) -> float:
    value = json.loads(columns or "{}").get(key)
    try:
        return float("nan") if value is None else float(value)
    except (TypeError, ValueError):
        return float("nan")


def _without_number(rows: pa.Table, key: str, place: int, count: int) -> str:
    row = rows.slice(place, 1).to_pylist()[0]
    columns: Mapping[str, Any] = json.loads(row["columns"] or "{}")
    known = [*columns, *dict(row["scores"] or [])]
    text = f"task set {row['taskset']!r}: task {row['task_id']}"
    if key in columns:
        text += f" holds {columns[key]!r} under {key!r}, which is no number"
    else:
        text += f" has no {key!r}; it has {', '.join(known) or 'no columns'}{did_you_mean(key, known)}"
    others = f" ({count:,} of {rows.num_rows:,} tasks)" if count > 1 else ""
    return f"{text}{others}; `feature_keys` name columns of the task set or scores of task operators"
