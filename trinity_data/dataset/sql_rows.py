"""Rows of a table or query of a SQLite or DuckDB database, in the order of a key. The database is only read.

The rows are copied into a temporary file as JSON lines, so that they are the same for as long as they are
read, whatever others write into the database meanwhile, and take no memory.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from trinity_data.config.defaults import SQL_SCHEMES
from trinity_data.dataset.row import Row, columns_text
from trinity_data.dataset.text_files import JsonLines
from trinity_data.errors import ConfigError, did_you_mean

_BATCH_ROWS = 1000
_TABLE = re.compile(r"\w+(\.\w+)*")
_MAGIC: dict[Literal["sqlite", "duckdb"], tuple[int, bytes]] = {
    "sqlite": (0, b"SQLite format 3\0"),
    "duckdb": (8, b"DUCK"),
}


@dataclass(frozen=True)
class SqlQuery:
    """Rows of a database."""

    path: str
    """`sqlite:///NAME.db`, `duckdb:///NAME.duckdb`, or a file of either."""
    query: str
    """A table, or SQL that selects."""
    order_by: str
    """Columns of the answer, separated by commas, that no two rows have in common."""

    @property
    def file(self) -> Path:
        """Of the database."""
        scheme = next((each for each in SQL_SCHEMES if self.path.startswith(each)), "")
        return Path(self.path.removeprefix(scheme)).expanduser()

    @property
    def keys(self) -> list[str]:
        return [name.strip() for name in self.order_by.split(",")]

    @property
    def unordered(self) -> str:
        """The query as a statement of its own."""
        inner = f"SELECT * FROM {self.query}" if _TABLE.fullmatch(self.query.strip()) else self.query
        # a comment at the end of the query ends with its line
        return f"SELECT * FROM (\n{inner.strip().rstrip(';')}\n) AS answer"

    def ordered(self, limit: int | None) -> str:
        order = ", ".join('"{}"'.format(name.replace('"', '""')) for name in self.keys)
        return f"{self.unordered} ORDER BY {order}" + ("" if limit is None else f" LIMIT {limit}")


class SqlRows:
    """By number, from 0 in the order of the key."""

    def __init__(self, query: SqlQuery, *, limit: int | None = None) -> None:
        """Raises ConfigError for a query that cannot be asked, and for rows without an order."""
        with _cursor(query) as cursor:
            self.columns = _columns(query, cursor.execute(f"{query.unordered} LIMIT 0").description)
            cursor.execute(query.ordered(limit))
            # the digest is of every row in its order
            lines, self.digest = _spooled(query, self.columns, cursor)
        self._lines = JsonLines(Path(query.path), lines)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, number: int) -> Row:
        return self._lines[number]


def _spooled(query: SqlQuery, columns: Sequence[str], cursor: Any) -> tuple[BinaryIO, str]:
    """The rows as JSON lines in a temporary file, and their digest."""
    digest, before = hashlib.blake2b(digest_size=16), list[Any]()
    lines: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the rows)
    while rows := cursor.fetchmany(_BATCH_ROWS):
        for values in rows:
            row = dict(zip(columns, values, strict=True))
            key = [row[name] for name in query.keys]
            if key == before:
                raise ConfigError(
                    f"{query.path}: order_by: two rows have {query.order_by} = {', '.join(map(str, key))}, "
                    "so that their order may change; name columns that no two rows have in common"
                )
            before = key
            line = columns_text(row).encode() + b"\n"
            digest.update(line)
            lines.write(line)
    return lines, digest.hexdigest()


@contextmanager
def _cursor(query: SqlQuery) -> Iterator[Any]:
    """Of a connection that cannot write; what the database refuses is a ConfigError."""
    import duckdb

    if not query.file.is_file():
        raise ConfigError(f"{query.path}: no such file; seen from {Path.cwd()}")
    with query.file.open("rb") as file:
        start = file.read(16)
    kinds = [kind for kind, (place, magic) in _MAGIC.items() if start[place:].startswith(magic)]
    if len(kinds) != 1:
        raise ConfigError(f"{query.path}: neither a SQLite nor a DuckDB database")
    connection: Any
    try:
        if kinds == ["sqlite"]:
            connection = sqlite3.connect(f"{query.file.resolve().as_uri()}?mode=ro", uri=True)
        else:
            connection = duckdb.connect(str(query.file), read_only=True)
        with closing(connection):
            yield connection.cursor()
    except (sqlite3.Error, duckdb.Error, UnicodeError) as error:
        raise ConfigError(f"{query.path}: query {query.query!r}: {error}") from error


def _columns(query: SqlQuery, description: Any) -> list[str]:
    # names that the query has twice are made different by both databases
    names = [str(column[0]) for column in description]
    for name in query.keys:
        if name not in names:
            raise ConfigError(
                f"{query.path}: order_by: has no column {name!r}; it has {', '.join(names)}"
                f"{did_you_mean(name, names)}"
            )
    return names
