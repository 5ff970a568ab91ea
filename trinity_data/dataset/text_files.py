"""Rows of JSON and CSV files by number, as they are written, and problems with their file and line.

Of JSON only the places of the lines are kept in memory; CSV is held there as Arrow. A compressed file
is unpacked into a temporary one first. A column of a CSV file becomes numbers only where its numbers read
back as the file has them: `007` and `1.50` stay text, `NA` is a word, and an empty cell is null.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from trinity_data.dataset.row import Row, UnreadableRow, as_written
from trinity_data.errors import ConfigError

_BLOCK_BYTES = 1 << 24
_BOM = b"\xef\xbb\xbf"
_NEWLINE = ord("\n")


class JsonRows:
    """The rows of several files, one file after the other."""

    def __init__(self, files: Sequence[Path], *, skip_bad_rows: bool = False) -> None:
        """With `skip_bad_rows` a row that cannot be read is an UnreadableRow, not a ConfigError."""
        self.skip_bad_rows = skip_bad_rows
        self._files: list[JsonLines | _Items] = []
        for file in files:
            data = opened(file)
            start = data.read(_BLOCK_BYTES).removeprefix(_BOM).lstrip()
            self._files.append(_Items(file, data) if start.startswith(b"[") else JsonLines(file, data))
        self._firsts = [0, *accumulate(map(len, self._files))]

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, number: int) -> Row:
        file = bisect_right(self._firsts, number) - 1
        try:
            return self._files[file][number - self._firsts[file]]
        except ConfigError as error:
            if not self.skip_bad_rows:
                raise
            return UnreadableRow(str(error))


class JsonLines:
    """An object a line. `file` is named where a line is none."""

    def __init__(self, file: Path, data: BinaryIO) -> None:
        self.file, self._data = file, data
        starts, stops = _line_bounds(data)
        written = stops - starts > 2  # a newline, and perhaps a carriage return
        self._numbers = np.flatnonzero(written) + 1
        self._starts, self._stops = starts[written], stops[written]

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> Row:
        start, stop = int(self._starts[number]), int(self._stops[number])
        # a buffered read would fetch what lies behind the line too
        line = os.pread(self._data.fileno(), stop - start, start)
        return parsed(line, f"{self.file}:{self._numbers[number]}")


class _Items:
    """An array of objects, held in memory."""

    def __init__(self, file: Path, data: BinaryIO) -> None:
        data.seek(0)
        self.file, self._rows = file, _loaded(data.read(), str(file))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Row:
        return _an_object(self._rows[number], f"{self.file}, item {number}")


def parsed(line: bytes, where: str) -> Row:
    """One line as a row. Raises ConfigError with `where` for what is no JSON object."""
    return _an_object(_loaded(line, where), where)


def opened(file: Path) -> BinaryIO:
    """The file's content to read from anywhere in it."""
    if file.suffix != ".gz":
        return file.open("rb")
    unpacked: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the source)
    try:
        with gzip.open(file) as packed:
            shutil.copyfileobj(packed, unpacked)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{file}: cannot be unpacked: {error}") from error
    unpacked.seek(0)
    return unpacked


def _line_bounds(data: BinaryIO) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where each line starts, and where it ends behind its newline."""
    data.seek(0)
    stops: list[npt.NDArray[np.int64]] = []
    start = size = len(_BOM) if data.read(len(_BOM)) == _BOM else 0
    data.seek(start)
    while block := data.read(_BLOCK_BYTES):
        stops.append(np.flatnonzero(np.frombuffer(block, np.uint8) == _NEWLINE) + size + 1)
        size += len(block)
    ends = np.concatenate([np.zeros(0, np.int64), *stops])
    if size > (ends[-1] if len(ends) else start):
        ends = np.append(ends, size + 1)  # the last line has no newline
    return np.concatenate([[start], ends[:-1]]) if len(ends) else ends, ends


def _loaded(text: bytes, where: str) -> Any:
    try:
        value = _DECODER.decode(text.removeprefix(_BOM).decode())
        if b"\\ud" in text.lower():
            # half of a character that is written as two, which no UTF-8 can hold
            json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise ConfigError(f"{where}: not UTF-8: {error.reason}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where}: not JSON: {error}; a file holds an object a line, or one array of objects"
        ) from error
    return value


def _each_key_once(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is given twice")
    return row


# `json.loads` would make a decoder for each row
_DECODER = json.JSONDecoder(object_pairs_hook=_each_key_once)


def _an_object(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: found {type(value).__name__}; a row is an object of columns")
    return value


class CsvRows:
    """The rows of several files, one file after the other, held in memory as Arrow."""

    def __init__(self, files: Sequence[Path]) -> None:
        tables = [_as_text(file) for file in files]
        table = pa.concat_tables(tables, promote_options="default")
        self.columns: list[str] = table.column_names
        self._table = pa.table({name: _typed(table[name]) for name in table.column_names})

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, number: int) -> Row:
        return {name: self._table[name][number].as_py() for name in self.columns}


def _as_text(file: Path) -> pa.Table:
    """Every cell as text."""
    try:
        names = _read(file).schema.names
        types: dict[str, pa.DataType] = dict.fromkeys(names, pa.string())
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


def _typed(column: pa.ChunkedArray[Any]) -> pa.ChunkedArray[Any]:
    """As whole numbers or floats where nothing is lost by it."""
    for kind in (pa.int64(), pa.float64()):
        try:
            numbers = pc.cast(column, kind)
        except pa.ArrowInvalid:
            continue
        if [as_written(number) for number in numbers.to_pylist()] == column.to_pylist():
            return numbers
    return column
