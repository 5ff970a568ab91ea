"""Rows of a split that are read from front to back, as they are needed: never all of them, and from the hub
without a download of the whole.

A row's number is its place in the split's files, as of `Source`.
"""

from __future__ import annotations

import csv
import io
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from trinity_data.config.hub import looks_like_a_hub_id
from trinity_data.dataset.arrow_rows import load, naming_problems, parquet_names, plain_rows
from trinity_data.dataset.files import SplitPart, format_of, split_files, split_parts, unpacked
from trinity_data.dataset.reader import DatasetSpec
from trinity_data.dataset.row import Row, UnreadableRow
from trinity_data.dataset.text_files import parsed
from trinity_data.errors import ConfigError

Reading: TypeAlias = Callable[[int], Iterator[Row]]
"""The rows from one of this number on."""

SHUFFLED_ROWS = 1000
"""Rows among which the next one is drawn, where they are shuffled."""
_HEAD_ROWS, _MOST_ROWS = 100, 10_000
"""From which columns are taken; in which one that is missing there is looked for."""
_BATCH_ROWS = 1000
_ALLOWED = "allowed with streaming: train, train[:100], train[10:20]"


class StreamedSource:
    """Its places are those in the order of reading."""

    def __init__(self, spec: DatasetSpec, *, seed: int | None = None, read: Collection[int] = ()) -> None:
        """With a `seed` the rows are shuffled, as far as that goes without having all of them. `read` are
        the numbers of rows that were read before, which come first.
        """
        part = _only_part(spec.split)
        self.name = spec.path
        self._start, stop = part.start or 0, sys.maxsize if part.stop is None else part.stop
        limit = sys.maxsize if spec.limit is None else spec.limit
        self.num_rows = max(0, min(stop - self._start, limit))
        """The most that there can be."""
        self._seed, self._read = seed, frozenset(read)
        self._reading = _opened(spec, part)
        self._next, self._rows = -1, iter(list[tuple[int, Row]]())

    def columns(self, needed: Collection[str] = ()) -> list[str]:
        """The names of the columns of the first rows; those `needed` are looked for in more."""
        names: dict[str, None] = {}
        for count, (_, row) in enumerate(islice(self._stream(self._start), _MOST_ROWS)):
            if count >= _HEAD_ROWS and {*needed} <= names.keys():
                break
            names |= dict.fromkeys(row)
        return list(names)

    def is_empty(self) -> bool:
        return next(self._stream(self._start), None) is None

    def numbered(self, places: Sequence[int]) -> Iterator[tuple[int, Row]]:
        """The rows at consecutive places, with their numbers; fewer where the split ends."""
        if places and places[0] != self._next:
            self._next, self._rows = places[0], self._from(places[0])
        for each in islice(self._rows, len(places)):
            self._next += 1
            yield each

    def _from(self, place: int) -> Iterator[tuple[int, Row]]:
        """From a place on: the rows that were read before, then the others."""
        if place < len(self._read):
            was_read = (each for each in self._in_order(self._start) if each[0] in self._read)
            yield from islice(was_read, place, len(self._read))
        first = self._start
        # what is not decoded costs little
        while self._seed is None and first in self._read:
            first += 1
        others = (each for each in self._in_order(first) if each[0] not in self._read)
        yield from islice(others, max(0, place - len(self._read)), None)

    def _in_order(self, first: int) -> Iterator[tuple[int, Row]]:
        rows = self._stream(first)
        return rows if self._seed is None else shuffled(rows, self._seed)

    def _stream(self, first: int) -> Iterator[tuple[int, Row]]:
        """In the order of the files."""
        last = min(self._start + self.num_rows, sys.maxsize)
        return zip(range(first, last), self._reading(first), strict=False)


def shuffled(rows: Iterator[tuple[int, Row]], seed: int) -> Iterator[tuple[int, Row]]:
    """Each drawn from the next SHUFFLED_ROWS that are left: the same for the same rows and seed."""
    random, waiting = np.random.default_rng(seed), list(islice(rows, SHUFFLED_ROWS))
    for row in rows:
        place = int(random.integers(len(waiting)))
        drawn, waiting[place] = waiting[place], row
        yield drawn
    for place in random.permutation(len(waiting)).tolist():
        yield waiting[place]


def _only_part(split: str) -> SplitPart:
    parts = split_parts(split)
    if len(parts) > 1 or parts[0].percent or min(parts[0].start or 0, parts[0].stop or 0) < 0:
        raise ConfigError(
            f"found split {split!r}; a stream is of one split, whose end is not known; {_ALLOWED}"
        )
    return parts[0]


def _opened(spec: DatasetSpec, part: SplitPart) -> Reading:
    path = Path(spec.path).expanduser()
    if not path.exists():
        if not looks_like_a_hub_id(spec.path):
            raise ConfigError(f"{spec.path}: no such file or folder; seen from {Path.cwd()}")
        return _of_tables(spec, spec.path, spec.subset_name, split=part.name)
    ((_, files),) = split_files(path, spec.subset_name, spec.split)
    kind = format_of(files[0])
    if kind == "json":
        return lambda first: _json_rows(files, first, skip_bad_rows=spec.skip_bad_rows)
    if kind == "csv":
        return lambda first: islice(_csv_rows(files), first, None)
    return _of_tables(spec, kind, data_files=parquet_names(files), split="train")


def _of_tables(spec: DatasetSpec, *named: str | None, **options: Any) -> Reading:
    dataset = load(spec.path, spec.split, *named, streaming=True, **options).with_format("arrow")

    def rows(first: int) -> Iterator[Row]:
        place = 0
        with naming_problems(spec.path, spec.split):
            table: pa.Table
            for table in dataset.iter(batch_size=_BATCH_ROWS):
                skipped = min(max(first - place, 0), table.num_rows)
                place += table.num_rows
                yield from plain_rows(table.slice(skipped))

    return rows


def _json_rows(files: Sequence[Path], first: int, *, skip_bad_rows: bool) -> Iterator[Row]:
    for file, number, line in islice(_lines(files), first, None):
        try:
            yield parsed(line, f"{file}:{number}")
        except ConfigError as error:
            if not skip_bad_rows:
                raise
            yield UnreadableRow(str(error))


def _lines(files: Sequence[Path]) -> Iterator[tuple[Path, int, bytes]]:
    """Each that is not empty, with its file and number."""
    for file in files:
        try:
            with unpacked(file) as data:
                for number, line in enumerate(data, 1):
                    if number == 1 and line.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
                        raise ConfigError(
                            f"{file}: holds an array, which is read as a whole; write an object a line, "
                            "or streaming: false"
                        )
                    if line.strip(b"\r\n"):
                        yield file, number, line
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(f"{file}: cannot be read: {error}") from error


def _csv_rows(files: Sequence[Path]) -> Iterator[Row]:
    """Cells as text: what all of a column are is known only at its end. An empty one is null."""
    for file in files:
        try:
            with io.TextIOWrapper(unpacked(file), encoding="utf-8-sig", newline="") as text:
                reader = csv.reader(text, strict=True)
                columns = next(reader, [])
                for cells in filter(None, reader):
                    if len(cells) != len(columns):
                        found = f"found {len(cells)} cells; there are {len(columns)} columns"
                        raise ConfigError(f"{file}:{reader.line_num}: {found}")
                    yield {name: cell or None for name, cell in zip(columns, cells, strict=True)}
        except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
            raise ConfigError(f"{file}: cannot be read as CSV: {error}") from error
