"""Answers of runs in Python: rows as Arrow, and from there as what other libraries take.

Each question is answered as of the time it is asked; an answer does not change afterwards.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from trinity_data.dataset.task_queue import push_tasks
from trinity_data.errors import StoreError, TrinityError
from trinity_data.schema import values_of
from trinity_data.store.sql import open_sql

if TYPE_CHECKING:
    import datasets
    import pandas

_SHOWN_ROWS = 10


class Runs:
    """Runs that can be asked. Holds no files open between questions."""

    def __init__(self, folders: Sequence[Path], *, as_of: int | str | None = None) -> None:
        if not folders:
            raise StoreError("no run was named; give at least one job folder, or project/name")
        self.folders = list(folders)
        self.as_of = as_of

    def sql(self, query: str, *, timeout_seconds: float | None = 60.0) -> QueryResult:
        """The rows that one SELECT gives. Raises StoreError in DuckDB's words."""
        with open_sql(self.folders, timeout_seconds=timeout_seconds, as_of=self.as_of) as session:
            return QueryResult(session.query(query))

    def push_tasks(
        self, rows: Iterable[Mapping[str, Any]], *, taskset: str | None = None, close: bool = False
    ) -> int:
        """Pushes tasks into the queue of the run, which explores them as they come; returns their number.

        `close` ends the queue. Raises StoreError where there is no such queue, or several runs are open,
        ConfigError for rows without a column of its format; then nothing was pushed.
        """
        if len(self.folders) > 1:
            raise StoreError(f"found {len(self.folders)} runs; open the one that is to have the tasks")
        return push_tasks(self.folders[0], rows, taskset=taskset, close=close)

    def __repr__(self) -> str:
        at = "" if self.as_of is None else f" as of {self.as_of}"
        return f"<{', '.join(map(str, self.folders))}{at}>"


class QueryResult:
    """The rows of one query."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def arrow(self) -> pa.Table:
        """As they are: lists as lists, maps as maps."""
        return self._table

    def pandas(self) -> pandas.DataFrame:
        """Maps become dicts."""
        return self._table.to_pandas(maps_as_pydicts="strict")

    def polars(self) -> Any:
        """A `polars.DataFrame`; maps become lists of (key, value). Refused when polars is not installed."""
        try:
            polars: Any = importlib.import_module("polars")
        except ImportError:
            raise PackageMissingError(
                "polars is not installed, and trinity-data does not need it: `pip install polars`, "
                "or take `.pandas()` or `.arrow()`"
            ) from None
        return polars.from_arrow(without_maps(self._table))

    def dataset(self) -> datasets.Dataset:
        """Of Hugging Face; maps become lists of (key, value)."""
        import datasets

        return datasets.Dataset(without_maps(self._table))

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __repr__(self) -> str:
        shown = (
            self._table.slice(0, _SHOWN_ROWS).to_pandas(maps_as_pydicts="lossy").to_string(max_colwidth=60)
        )
        return f"{shown}\n[{self._table.num_rows} rows × {self._table.num_columns} columns]"


class PackageMissingError(TrinityError, ImportError):
    """An optional package is needed for this."""


def without_maps(table: pa.Table) -> pa.Table:
    """Maps as lists of (key, value), for libraries that know no maps."""
    for number, field in enumerate(table.schema):
        if pa.types.is_map(field.type):
            as_list = pa.list_(pa.struct([("key", field.type.key_type), ("value", field.type.item_type)]))
            rows = [
                None if row is None else [{"key": key, "value": value} for key, value in row]
                for row in values_of(table[field.name])
            ]
            table = table.set_column(number, field.name, pa.array(rows, as_list))
    return table
