"""Reading a copy of experiences back, whichever tool's format it has: the same rows with the same types."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from trinity_data.errors import ConfigError, did_you_mean
from trinity_data.exchange.buffer_file import COPIED, DUCKDB, LINES, SQLITE, TABLES, buffer_file_path

NEEDED = ("experience_id", "token_ids", "prompt_length", "response_length")


def read_buffer_file(path: str, folder: Path) -> pa.Table:
    """All rows of the copy.

    A relative path is looked for in `folder` first, and then from the working directory.
    """
    target = buffer_file_path(path, folder)
    if not target.exists():
        target = buffer_file_path(path, Path())
    if not target.exists():
        raise ConfigError(f"found {path!r}; there is no {target}, and none in {folder}")
    try:
        rows = _read(target, path)
    except (sqlite3.Error, duckdb.Error, pa.ArrowException, ValueError) as error:
        raise ConfigError(f"found {path!r}, which holds no experiences that can be read: {error}") from error
    missing = [name for name in NEEDED if name not in rows.column_names]
    if missing:
        near = did_you_mean(missing[0], rows.column_names)
        raise ConfigError(f"{target} has no column {missing[0]!r}{near}; it holds no experiences of a run")
    return rows


def _read(target: Path, path: str) -> pa.Table:
    if path.startswith(SQLITE):
        return _read_sqlite(target)
    if path.startswith(DUCKDB):
        with duckdb.connect(str(target), read_only=True) as connection:
            return _typed(connection.sql(f"FROM {_table(connection)}").to_arrow_table())
    if path.endswith(LINES):
        with target.open(encoding="utf-8") as file:
            return _restored(json.loads(line) for line in file)
    return _typed(pq.read_table(target))


def _read_sqlite(target: Path) -> pa.Table:
    with closing(sqlite3.connect(f"{target.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        table = _table(connection)
        connection.row_factory = sqlite3.Row
        found = [dict(row) for row in connection.execute(f"SELECT * FROM {table} ORDER BY rowid")]
    nested = [field.name for field in COPIED if pa.types.is_nested(field.type)]
    for row in found:
        row |= {name: json.loads(row[name]) for name in nested if row.get(name) is not None}
    return _restored(found)


def _table(connection: sqlite3.Connection | duckdb.DuckDBPyConnection) -> str:
    """The one that is there; `experiences` where there is none, for the database's own words."""
    # DuckDB has SQLite's catalogue too
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master").fetchall()}
    return next((name for name in TABLES if name in names), TABLES[0])


def _restored(rows: Iterable[dict[str, Any]]) -> pa.Table:
    """Rows of plain JSON values in the columns that a copy has."""
    found = list(rows)
    names = {name for row in found for name in row}
    fields = [field for field in COPIED if field.name in names]
    columns = [
        pa.array([_value(row.get(field.name), field.type) for row in found], field.type) for field in fields
    ]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def _value(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_timestamp(kind):
        return datetime.fromisoformat(value)
    if pa.types.is_map(kind):
        return list(value.items())
    return bool(value) if pa.types.is_boolean(kind) else value


def _typed(rows: pa.Table) -> pa.Table:
    fields = [field for field in COPIED if field.name in rows.column_names]
    return rows.select([field.name for field in fields]).cast(pa.schema(fields))
