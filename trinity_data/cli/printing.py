"""Rows as a person or a program wants them.

A table is cut to the width of the terminal, the other forms are whole.
"""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_data.atomic import replace_file
from trinity_data.errors import StoreError
from trinity_data.terminal import visible, visible_json

if TYPE_CHECKING:
    import pyarrow as pa

_PLAIN_WIDTH = 200
_CELL = 300


class Format(StrEnum):
    TABLE = "table"
    CSV = "csv"
    JSON = "json"
    PARQUET = "parquet"


def write_answer(table: pa.Table, format: Format, to: Path | None = None) -> None:
    """To standard output, or to a file, whole or not at all."""
    if to is None:
        _refuse_binary(format)
        _print(table, format)
        return
    try:
        with replace_file(to) as partial:
            partial.write_bytes(_as_bytes(table, format))
    except OSError as error:
        raise StoreError(f"cannot write {to}: {error.strerror}") from error


def print_table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Columns under bold names; numbers to the right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = [list(row) for row in rows]
    printed = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(names):
        numeric = bool(shown) and all(isinstance(row[number], int | float | None) for row in shown)
        printed.add_column(Text(visible(name)), justify="right" if numeric else "left")
    for row in shown:
        printed.add_row(*(Text(cell(value)) for value in row))
    Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH).print(printed)


def cell(value: object) -> str:
    """A value in few characters, none of which a terminal obeys."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = "" if value is None else visible(str(value))
    return text if len(text) <= _CELL else f"{text[: _CELL - 3]}..."


def _print(table: pa.Table, format: Format) -> None:
    if format is Format.PARQUET:
        sys.stdout.buffer.write(_as_bytes(table, format))
    elif format is Format.JSON:
        for row in table.to_pylist(maps_as_pydicts="lossy"):
            print(visible_json(json.dumps(_as_json(row), ensure_ascii=False, default=str)))
    elif format is Format.CSV:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        # a file gets the text as it is
        shown = visible if sys.stdout.isatty() else str
        writer.writerow(map(shown, table.column_names))
        for row in table.to_pylist(maps_as_pydicts="lossy"):
            cells = map(_csv_cell, row.values())
            writer.writerow([shown(cell) if isinstance(cell, str) else cell for cell in cells])
    else:
        columns = [column.to_pylist(maps_as_pydicts="lossy") for column in table.columns]
        print_table(table.column_names, zip(*columns, strict=True))
        print(f"{table.num_rows:,} {'row' if table.num_rows == 1 else 'rows'}")


def _as_bytes(table: pa.Table, format: Format) -> bytes:
    if format is Format.PARQUET:
        import pyarrow.parquet as pq

        sink = io.BytesIO()
        pq.write_table(table, sink, compression="zstd")
        return sink.getvalue()
    text = io.StringIO()
    with redirect_stdout(text):
        _print(table, format)
    return text.getvalue().encode()


def _refuse_binary(format: Format) -> None:
    if format is Format.PARQUET and sys.stdout.isatty():
        raise StoreError("Parquet is not for a terminal; name a file with --to, or redirect the output")


def _csv_cell(value: Any) -> Any:
    return (
        json.dumps(_as_json(value), ensure_ascii=False, default=str)
        if isinstance(value, list | dict)
        else value
    )


def _as_json(value: Any) -> Any:
    """JSON knows no NaN and no infinity, which become null, and one kind of number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, dict):
        return {key: _as_json(part) for key, part in value.items()}
    return [_as_json(part) for part in value] if isinstance(value, list) else value
