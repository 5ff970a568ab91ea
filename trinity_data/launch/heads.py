"""The first rows of data files, read once for all checks of a pipeline file."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from trinity_data.dataset.files import first_rows
from trinity_data.dataset.sql_rows import SqlQuery, SqlRows

HEAD_ROWS = 100

Head = tuple[list[str], list[dict[str, Any]]]
"""The names of the columns, and the rows; not to be changed."""


def head_of(file: Path, *, skip_bad_rows: bool = False) -> Head:
    """`skip_bad_rows` is as in `JsonRows`.

    Raises ConfigError and OSError for a file that cannot be read."""
    status = file.stat()
    return _head(file, status.st_mtime_ns, status.st_size, skip_bad_rows)


@lru_cache(maxsize=8)
def head_of_answer(query: SqlQuery) -> Head:
    """Raises ConfigError for a query that cannot be asked."""
    rows = SqlRows(query, limit=HEAD_ROWS)
    return rows.columns, [rows[number] for number in range(len(rows))]


def forget_heads() -> None:
    """Frees the rows."""
    _head.cache_clear()
    head_of_answer.cache_clear()


@lru_cache(maxsize=8)
def _head(file: Path, changed: int, size: int, skip_bad_rows: bool) -> Head:
    return first_rows(file, HEAD_ROWS, skip_bad_rows=skip_bad_rows)
