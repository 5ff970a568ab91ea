"""Rows of JSON files by number, read one at a time: numbers as they are written,
problems with their file and line.

Only the places of the lines are kept in memory. A compressed file is unpacked into a temporary one first.
"""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from trinity_data.errors import ConfigError

Row = dict[str, Any]

_BLOCK_BYTES = 1 << 24
_BOM = b"\xef\xbb\xbf"
_NEWLINE = ord("\n")


class JsonRows:
    """The rows of several files, one file after the other."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = [_open(file) for file in files]
        self._firsts = np.cumsum([0, *(len(file) for file in self._files)])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, number: int) -> Row:
        file = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return self._files[file][number - int(self._firsts[file])]


class _Lines:
    """An object a line."""

    def __init__(self, file: Path, data: BinaryIO) -> None:
        self.file, self._data = file, data
        starts, stops = _line_bounds(data)
        written = stops - starts > 2  # a newline, and perhaps a carriage return
        self._numbers = np.flatnonzero(written) + 1
        self._starts, self._stops = starts[written], stops[written]

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> Row:
        self._data.seek(int(self._starts[number]))
        line = self._data.read(int(self._stops[number] - self._starts[number]))
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


def _open(file: Path) -> _Lines | _Items:
    data = opened(file)
    start = data.read(_BLOCK_BYTES).removeprefix(_BOM).lstrip()
    return _Items(file, data) if start.startswith(b"[") else _Lines(file, data)


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
        return json.loads(text.decode("utf-8-sig"), object_pairs_hook=_each_key_once)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not UTF-8: {error.reason}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where}: not JSON: {error}; a file holds an object a line, or one array of objects"
        ) from error


def _each_key_once(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is given twice")
    return row


def _an_object(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: found {type(value).__name__}; a row is an object of columns")
    return value
