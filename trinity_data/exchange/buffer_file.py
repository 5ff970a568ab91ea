"""Copies of the experiences for tools that read SQLite, DuckDB, Parquet or JSON lines.

The store stays the one source; a copy is renewed whole, and says of each row what became of it.
Rows pass through memory a chunk at a time, and DuckDB makes the JSON.
Read back, a copy gives the same rows with the same types, whichever tool's format it has.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trinity_data.atomic import replace_file, replace_folder
from trinity_data.errors import ConfigError, StoreError, did_you_mean
from trinity_data.schema import EXPERIENCES, OUTCOMES, filled, values_of
from trinity_data.store.protocol import ReadableStore

SQLITE, DUCKDB = "sqlite:///", "duckdb:///"
LINES = ".jsonl"
PARQUET_FILE = "experiences.parquet"
"""In a copy that is a folder."""
CHUNK_ROWS = 1000
TABLES = ("experiences", "pipeline_input")
"""What the one table of a copy that is a database may be called."""

COPIED = pa.schema(
    [
        *EXPERIENCES,
        pa.field("shaped_reward", pa.float64()),
        pa.field("advantage", pa.float64()),
        pa.field("shaped_token_rewards", OUTCOMES.field("token_rewards").type),
        pa.field("token_advantages", OUTCOMES.field("token_advantages").type),
        pa.field("kept", pa.bool_()),  # by the operators; null before they ran
        pa.field("dropped_by", pa.string()),
    ]
)
"""The columns of a copy: a row as it was made, and its outcome."""
_OF_OUTCOMES = ("reward", "advantage", "token_rewards", "token_advantages", "kept", "dropped_by")
"""The last columns of COPIED, by their names in `outcomes`."""


class CopyCancelledError(Exception):
    """The copy was stopped; the one before it is as it was."""


@dataclass(frozen=True)
class Copy:
    """One copy: where to, and of which rows."""

    path: str
    """`sqlite:///NAME`, `duckdb:///NAME`, `NAME.jsonl` or the folder `NAME`."""
    table: str = "experiences"
    """Of a copy that is a database."""
    explored_only: bool = False
    """Leaves out rows that a stage took from elsewhere."""


def write_buffer_file(
    store: ReadableStore, copy: Copy, folder: Path, *, is_cancelled: Callable[[], bool] = lambda: False
) -> Path:
    """Writes all experiences beside the copy that is there below `folder`, and then puts them in its place.

    Raises CopyCancelledError soon after `is_cancelled`, OSError where it cannot be written.
    Then the copy before is as it was.
    """
    target = buffer_file_path(copy.path, folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    chunks = _chunks(store, copy.explored_only, is_cancelled)
    try:
        _format(copy.path).write(chunks, target, copy.table)
    except (sqlite3.Error, duckdb.Error, pa.ArrowException) as error:
        raise StoreError(f"{target} cannot be written: {error}") from error
    return target


def buffer_file_path(path: str, folder: Path) -> Path:
    """The file or folder that `path` means; a relative one lies below `folder`."""
    scheme, separator, _ = path.partition("://")
    if separator and not path.startswith((SQLITE, DUCKDB)):
        raise ConfigError(f"found {path!r}; {scheme}:// is no buffer; allowed: {ALLOWED}")
    return folder / Path(path.removeprefix(SQLITE).removeprefix(DUCKDB)).expanduser()


ALLOWED = "sqlite:///NAME.db, duckdb:///NAME.duckdb, NAME.jsonl or a folder"


def _chunks(
    store: ReadableStore, explored_only: bool, is_cancelled: Callable[[], bool]
) -> Iterator[pa.RecordBatch]:
    """At most CHUNK_ROWS rows each, with their outcomes."""
    outcomes = store.table("outcomes", columns=["experience_id", *_OF_OUTCOMES])
    place = {name: number for number, name in enumerate(values_of(outcomes["experience_id"]))}
    for rows in store.parts("experiences"):
        if explored_only:
            rows = rows.filter(pc.not_equal(filled(rows["explorer"], ""), pa.scalar("")))
        places = pa.array([place.get(name) for name in values_of(rows["experience_id"])], pa.int64())
        matched = outcomes.take(places)
        columns = [*rows.columns, *(matched[name] for name in _OF_OUTCOMES)]
        for chunk in pa.Table.from_arrays(columns, schema=COPIED).to_batches(max_chunksize=CHUNK_ROWS):
            if is_cancelled():
                raise CopyCancelledError
            yield chunk


class _Format(Protocol):
    """How a copy lies on the disk."""

    def write(self, chunks: Iterator[pa.RecordBatch], target: Path, table: str) -> None: ...
    def read(self, target: Path) -> pa.Table: ...


class _SqliteFile:
    """One typed column each; what SQLite has no type for, such as tokens, is JSON text."""

    def write(self, chunks: Iterator[pa.RecordBatch], target: Path, table: str) -> None:
        columns = [(field.name, *_sqlite_column(field)) for field in COPIED]
        declared = ", ".join(f"{name} {kind}" for name, kind, _ in columns)
        values = ", ".join(value for _, _, value in columns)
        places = ", ".join("?" for _ in COPIED)
        with (
            replace_file(target) as partial,
            closing(sqlite3.connect(partial, isolation_level=None)) as connection,
            _json_maker() as maker,
        ):
            # a file that was not written to its end is thrown away
            connection.execute("PRAGMA journal_mode = OFF")
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("BEGIN")
            connection.execute(f"CREATE TABLE {table} ({declared}, PRIMARY KEY (experience_id))")
            for chunk in chunks:
                maker.register("chunk", chunk)
                rows = maker.execute(f"SELECT {values} FROM chunk").fetchall()
                connection.executemany(f"INSERT INTO {table} VALUES ({places})", rows)
            connection.execute("COMMIT")

    def read(self, target: Path) -> pa.Table:
        with closing(sqlite3.connect(f"{target.resolve().as_uri()}?mode=ro", uri=True)) as database:
            table = _table(database)
            database.row_factory = sqlite3.Row
            rows = [dict(row) for row in database.execute(f"SELECT * FROM {table} ORDER BY rowid")]
        nested = [field.name for field in COPIED if pa.types.is_nested(field.type)]
        for row in rows:
            row |= {name: json.loads(row[name]) for name in nested if row.get(name) is not None}
        return _restored(rows)


class _DuckdbFile:
    def write(self, chunks: Iterator[pa.RecordBatch], target: Path, table: str) -> None:
        with replace_file(target) as partial, duckdb.connect(str(partial)) as connection:
            connection.register("chunk", COPIED.empty_table())
            connection.execute(f"CREATE TABLE {table} AS FROM chunk")
            for chunk in chunks:
                connection.register("chunk", chunk)
                connection.execute(f"INSERT INTO {table} FROM chunk")

    def read(self, target: Path) -> pa.Table:
        with duckdb.connect(str(target), read_only=True) as connection:
            return _typed(connection.sql(f"FROM {_table(connection)}").to_arrow_table())


class _Lines:
    """A JSON object a line."""

    def write(self, chunks: Iterator[pa.RecordBatch], target: Path, table: str) -> None:
        with (
            replace_file(target) as partial,
            partial.open("w", encoding="utf-8") as lines,
            _json_maker() as maker,
        ):
            for chunk in chunks:
                maker.register("chunk", chunk)
                rows = maker.execute("SELECT to_json(chunk)::VARCHAR FROM chunk").fetchall()
                lines.writelines(f"{row}\n" for (row,) in rows)

    def read(self, target: Path) -> pa.Table:
        with target.open(encoding="utf-8") as file:
            return _restored([json.loads(line) for line in file])


class _ParquetFolder:
    def write(self, chunks: Iterator[pa.RecordBatch], target: Path, table: str) -> None:
        with (
            replace_folder(target) as partial,
            pq.ParquetWriter(partial / PARQUET_FILE, COPIED, compression="zstd") as file,
        ):
            for chunk in chunks:
                file.write_batch(chunk)

    def read(self, target: Path) -> pa.Table:
        return _typed(pq.read_table(target))


def _format(path: str) -> _Format:
    """The one that a path names."""
    if path.startswith(SQLITE):
        return _SqliteFile()
    if path.startswith(DUCKDB):
        return _DuckdbFile()
    return _Lines() if path.endswith(LINES) else _ParquetFolder()


def _json_maker() -> duckdb.DuckDBPyConnection:
    """One thread, because the order of the rows is kept and the run may have other work."""
    maker = duckdb.connect(config={"threads": 1})
    maker.execute("SET TimeZone = 'UTC'")
    return maker


def _sqlite_column(field: pa.Field[Any]) -> tuple[str, str]:
    """Its type, and SQL for a value that SQLite takes."""
    if pa.types.is_nested(field.type):
        return "TEXT", f"to_json({field.name})::VARCHAR"
    if pa.types.is_timestamp(field.type):
        return "TEXT", f"{field.name}::VARCHAR"
    if pa.types.is_integer(field.type) or pa.types.is_boolean(field.type):
        return "INTEGER", field.name
    return "REAL" if pa.types.is_floating(field.type) else "TEXT", field.name


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
        rows = _format(path).read(target)
    except (sqlite3.Error, duckdb.Error, pa.ArrowException, ValueError) as error:
        raise ConfigError(f"found {path!r}, which holds no experiences that can be read: {error}") from error
    missing = [name for name in NEEDED if name not in rows.column_names]
    if missing:
        near = did_you_mean(missing[0], rows.column_names)
        raise ConfigError(f"{target} has no column {missing[0]!r}{near}; it holds no experiences of a run")
    return rows


def _table(connection: sqlite3.Connection | duckdb.DuckDBPyConnection) -> str:
    """The one that is there; `experiences` where there is none, for the database's own words."""
    # DuckDB has SQLite's catalogue too
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master").fetchall()}
    return next((name for name in TABLES if name in names), TABLES[0])


def _restored(rows: list[dict[str, Any]]) -> pa.Table:
    """Rows of plain JSON values in the columns that a copy has."""
    names = {name for row in rows for name in row}
    fields = [field for field in COPIED if field.name in names]
    columns = [
        pa.array([_value(row.get(field.name), field.type) for row in rows], field.type) for field in fields
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
