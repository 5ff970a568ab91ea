"""Copies of the experiences for tools that read SQLite, DuckDB, Parquet or JSON lines.

The store stays the one source; a copy is renewed whole, and says of each row what became of it.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from trinity_data.errors import ConfigError
from trinity_data.schema import EXPERIENCES
from trinity_data.store.reader import StoreReader

SQLITE, DUCKDB = "sqlite:///", "duckdb:///"
LINES = ".jsonl"
PARQUET_FILE = "experiences.parquet"
"""In a copy that is a folder."""
CHUNK_ROWS = 1000

COPIED = pa.schema(
    [
        *EXPERIENCES,
        pa.field("shaped_reward", pa.float64()),
        pa.field("advantage", pa.float64()),
        pa.field("kept", pa.bool_()),  # by the operators; null before they ran
        pa.field("dropped_by", pa.string()),
    ]
)
"""The columns of a copy: a row as it was made, and its outcome."""


def copy_experiences(store: StoreReader, path: str, folder: Path, *, explored_only: bool = False) -> Path:
    """Writes all experiences to `sqlite:///NAME`, `duckdb:///NAME`,
    `NAME.jsonl` or the folder `NAME`, below `folder`.

    `explored_only` leaves out rows that a stage took from elsewhere.
    """
    target = copy_target(path, folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    rows = _with_outcomes(store)
    if explored_only:
        rows = rows.filter(pa.compute.not_equal(pa.compute.fill_null(rows["explorer"], ""), ""))
    partial = target.with_name(f".{target.name}.partial")
    _remove(partial)
    _write(rows, path, partial)
    if target.is_dir():
        shutil.rmtree(target)
    os.replace(partial, target)
    return target


def copy_target(path: str, folder: Path) -> Path:
    """The file or folder that `path` means; a relative one lies below `folder`."""
    scheme, separator, _ = path.partition("://")
    if separator and not path.startswith((SQLITE, DUCKDB)):
        raise ConfigError(f"found {path!r}; {scheme}:// is no buffer; allowed: {ALLOWED}")
    return folder / Path(path.removeprefix(SQLITE).removeprefix(DUCKDB)).expanduser()


ALLOWED = "sqlite:///NAME.db, duckdb:///NAME.duckdb, NAME.jsonl or a folder"


def _with_outcomes(store: StoreReader) -> pa.Table:
    rows = store.table("experiences")
    outcomes = store.table("outcomes", columns=["experience_id", "reward", "advantage", "kept", "dropped_by"])
    place = {name: number for number, name in enumerate(outcomes["experience_id"].to_pylist())}
    found = pa.array([place.get(name) for name in rows["experience_id"].to_pylist()], pa.int64())
    judged = outcomes.take(found)
    columns = [*rows.columns, *(judged[name] for name in ("reward", "advantage", "kept", "dropped_by"))]
    return pa.Table.from_arrays(columns, schema=COPIED)


def _write(rows: pa.Table, path: str, partial: Path) -> None:
    if path.startswith(SQLITE):
        _write_sqlite(rows, partial)
    elif path.startswith(DUCKDB):
        _write_duckdb(rows, partial)
    elif path.endswith(LINES):
        _write_lines(rows, partial)
    else:
        partial.mkdir()
        pq.write_table(rows, partial / PARQUET_FILE, compression="zstd")


def _write_sqlite(rows: pa.Table, path: Path) -> None:
    """One typed column each; what SQLite has no type for, such as tokens, is JSON text."""
    declared = ", ".join(f"{field.name} {_sqlite_type(field.type)}" for field in COPIED)
    connection = sqlite3.connect(path)
    try:
        connection.execute(f"CREATE TABLE experiences ({declared}, PRIMARY KEY (experience_id))")
        places = ", ".join("?" for _ in COPIED)
        for chunk in _chunks(rows):
            values = [[_sqlite_value(row[field.name]) for field in COPIED] for row in chunk]
            connection.executemany(f"INSERT INTO experiences VALUES ({places})", values)
        connection.commit()
    finally:
        connection.close()


def _write_duckdb(rows: pa.Table, path: Path) -> None:
    with duckdb.connect(str(path)) as connection:
        connection.register("copied", rows)
        connection.execute("CREATE TABLE experiences AS SELECT * FROM copied")


def _write_lines(rows: pa.Table, path: Path) -> None:
    with path.open("w") as file:
        for chunk in _chunks(rows):
            file.writelines(json.dumps(row, default=str) + "\n" for row in chunk)


def _chunks(rows: pa.Table) -> Iterator[list[dict[str, Any]]]:
    for start in range(0, rows.num_rows, CHUNK_ROWS):
        yield rows.slice(start, CHUNK_ROWS).to_pylist()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def _sqlite_type(kind: pa.DataType) -> str:
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return "INTEGER"
    return "REAL" if pa.types.is_floating(kind) else "TEXT"


def _sqlite_value(value: Any) -> Any:
    if value is None or isinstance(value, (str, int, float)):
        return value
    return json.dumps(value, default=str) if isinstance(value, (list, dict)) else str(value)
