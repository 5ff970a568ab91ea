"""Copies of the experiences for tools that read SQLite or JSON lines. The store stays the one source; a copy is renewed whole."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from trinity_data.errors import ConfigError
from trinity_data.schema import TABLES
from trinity_data.store.reader import StoreReader

SQLITE = "sqlite:///"
CHUNK_ROWS = 1000


def copy_experiences(store: StoreReader, path: str, folder: Path) -> Path:
    """Writes all experiences to `sqlite:///NAME` or `NAME.jsonl`, relative to `folder`; tokens and log-probs are kept."""
    name = path.removeprefix(SQLITE)
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    partial.unlink(missing_ok=True)
    rows = store.table("experiences")
    if path.startswith(SQLITE):
        _write_sqlite(rows, partial)
    elif name.endswith(".jsonl"):
        _write_lines(rows, partial)
    else:
        raise ConfigError(
            f"buffer.trainer_input.experience_buffer.path: found {path!r}; allowed: sqlite:///NAME.db or NAME.jsonl"
        )
    os.replace(partial, target)
    return target


def _write_sqlite(rows: pa.Table, path: Path) -> None:
    """One typed column each; what SQLite has no type for, such as tokens, is JSON text."""
    fields = list(TABLES["experiences"])
    declared = ", ".join(f"{field.name} {_sqlite_type(field.type)}" for field in fields)
    connection = sqlite3.connect(path)
    try:
        connection.execute(f"CREATE TABLE experiences ({declared}, PRIMARY KEY (experience_id))")
        places = ", ".join("?" for _ in fields)
        for chunk in _chunks(rows):
            values = [[_sqlite_value(row[field.name]) for field in fields] for row in chunk]
            connection.executemany(f"INSERT INTO experiences VALUES ({places})", values)
        connection.commit()
    finally:
        connection.close()


def _write_lines(rows: pa.Table, path: Path) -> None:
    with path.open("w") as file:
        for chunk in _chunks(rows):
            file.writelines(json.dumps(row, default=str) + "\n" for row in chunk)


def _chunks(rows: pa.Table) -> Iterator[list[dict[str, Any]]]:
    for start in range(0, rows.num_rows, CHUNK_ROWS):
        yield rows.slice(start, CHUNK_ROWS).to_pylist()


def _sqlite_type(kind: pa.DataType) -> str:
    if pa.types.is_integer(kind):
        return "INTEGER"
    return "REAL" if pa.types.is_floating(kind) else "TEXT"


def _sqlite_value(value: Any) -> Any:
    if value is None or isinstance(value, (str, int, float)):
        return value
    return json.dumps(value, default=str)
