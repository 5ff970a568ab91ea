"""Rows of CSV files as they are written: a column becomes numbers only where its numbers read
back as the file has them.

So `007` and `1.50` stay text, `NA` is a word, and an empty cell is null.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from trinity_data.dataset.conversation import as_written
from trinity_data.dataset.json_rows import opened
from trinity_data.errors import ConfigError


class CsvRows:
    """The rows of several files, one file after the other, held in memory as Arrow."""

    def __init__(self, files: Sequence[Path]) -> None:
        tables = [_as_text(file) for file in files]
        table = pa.concat_tables(tables, promote_options="default")
        self.columns: list[str] = table.column_names
        self._table = pa.table({name: _typed(table[name]) for name in table.column_names})

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {name: self._table[name][number].as_py() for name in self.columns}


def _as_text(file: Path) -> pa.Table:
    """Every cell as text."""
    try:
        names = _read(file).schema.names
        types = dict.fromkeys(names, pa.string())
        return _read(file, types).read_all()
    except (pa.ArrowException, OSError, EOFError) as error:
        raise ConfigError(f"{file}: cannot be read as CSV: {error}") from error


def _read(file: Path, types: dict[str, pa.DataType] | None = None) -> pa.csv.CSVStreamingReader:
    """A reader of the file; opened here, since a path would be read as a pattern."""
    return pa.csv.open_csv(
        opened(file),
        parse_options=pa.csv.ParseOptions(newlines_in_values=True),
        convert_options=pa.csv.ConvertOptions(
            column_types=types, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
        ),
    )


def _typed(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """As whole numbers or floats where nothing is lost by it."""
    for kind in (pa.int64(), pa.float64()):
        try:
            numbers = pc.cast(column, kind)
        except pa.ArrowInvalid:
            continue
        if [as_written(number) for number in numbers.to_pylist()] == column.to_pylist():
            return numbers
    return column
