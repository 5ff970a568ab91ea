"""Rows as a person or a program wants them.

A table is cut to the width of the terminal, the other forms are whole.
"""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from trinity_data.atomic import replace_file
from trinity_data.errors import StoreError
from trinity_data.terminal import visible, visible_json

if TYPE_CHECKING:
    import pyarrow as pa

    from trinity_data.launch.preview import Bin

_PLAIN_WIDTH = 200
_CELL = 300
_BAR = 30


class Format(StrEnum):
    TABLE = "table"
    CSV = "csv"
    JSON = "json"
    PARQUET = "parquet"


def write_answer(table: pa.Table, format: Format, to: Path | None = None) -> None:
    """To standard output, or to a file, whole or not at all."""
    if to is None:
        if format is Format.PARQUET and sys.stdout.isatty():
            raise StoreError("Parquet is not for a terminal; name a file with --to, or redirect the output")
        _write(table, format, sys.stdout)
        return
    try:
        with replace_file(to) as partial, partial.open("w", encoding="utf-8", newline="") as file:
            _write(table, format, file)
    except OSError as error:
        raise StoreError(f"cannot write {to}: {error.strerror}") from error


def print_table(names: Sequence[str], rows: Iterable[Sequence[object]], *, to: TextIO | None = None) -> None:
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
    out = to or sys.stdout
    Console(file=out, width=None if out.isatty() else _PLAIN_WIDTH).print(printed)


def print_histogram(
    name: str, bins: Sequence[Bin], *, numbers: tuple[str, str], bar: Callable[[Bin], int]
) -> None:
    """Tasks by a number that each has, and the chosen ones among them; `bar` says which are drawn."""
    most = max(map(bar, bins), default=0) or 1
    rows = [(b.lower, b.upper, b.tasks, b.chosen, "█" * round(_BAR * bar(b) / most)) for b in bins]
    print_table((f"{name} from", "to", *numbers, ""), rows)


def print_json(value: object) -> None:
    """One object, on one line."""
    print(visible_json(_json_text(value)))


def cell(value: object) -> str:
    """A value in few characters, none of which a terminal obeys."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = "" if value is None else visible(str(value))
    return text if len(text) <= _CELL else f"{text[: _CELL - 3]}..."


def _write(table: pa.Table, format: Format, out: TextIO) -> None:
    if format is Format.PARQUET:
        import pyarrow.parquet as pq

        sink = io.BytesIO()  # a pipe has no position, which the writer asks for
        pq.write_table(table, sink, compression="zstd")
        out.buffer.write(sink.getbuffer())
    elif format is Format.JSON:
        for row in table.to_pylist(maps_as_pydicts="lossy"):
            print(visible_json(_json_text(row)), file=out)
    elif format is Format.CSV:
        writer = csv.writer(out, lineterminator="\n")
        # a file gets the text as it is
        shown = visible if out.isatty() else str
        writer.writerow(map(shown, table.column_names))
        for row in table.to_pylist(maps_as_pydicts="lossy"):
            cells = [_json_text(value) if isinstance(value, list | dict) else value for value in row.values()]
            writer.writerow([shown(cell) if isinstance(cell, str) else cell for cell in cells])
    else:
        columns = [column.to_pylist(maps_as_pydicts="lossy") for column in table.columns]
        print_table(table.column_names, zip(*columns, strict=True), to=out)
        print(f"{table.num_rows:,} {'row' if table.num_rows == 1 else 'rows'}", file=out)


def _json_text(value: object) -> str:
    return json.dumps(_as_json(value), ensure_ascii=False, default=str)


def _as_json(value: Any) -> Any:
    """JSON knows no NaN and no infinity, which become null, and one kind of number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, dict):
        return {key: _as_json(part) for key, part in value.items()}
    return [_as_json(part) for part in value] if isinstance(value, list) else value
