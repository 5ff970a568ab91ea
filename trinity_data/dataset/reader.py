"""Rows of task sets and of training data by number, from files or the hub.

JSON and CSV are read here, as they are written; Parquet and the hub come through `datasets`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from trinity_data.config import ExperienceBufferConfig, TasksetConfig
from trinity_data.config.hub import looks_like_a_hub_id
from trinity_data.dataset.arrow_rows import ArrowRows, load, parquet_names
from trinity_data.dataset.files import format_of, split_files
from trinity_data.dataset.row import Row
from trinity_data.dataset.sql_rows import SqlQuery, SqlRows
from trinity_data.dataset.text_files import CsvRows, JsonRows
from trinity_data.errors import ConfigError

# columns are taken from so many rows of a JSON file; a column that only later ones have is looked for in all
_HEAD_ROWS = 100

Places: TypeAlias = npt.NDArray[np.int64]
"""Of rows in their split, or their numbers there."""


@dataclass(frozen=True)
class DatasetSpec:
    """What to read. Small and serialisable, so that a Ray worker can open it itself."""

    path: str
    subset_name: str | None
    split: str
    limit: int | None = None
    skip_bad_rows: bool = False
    """A row of JSON that cannot be read is an UnreadableRow, not an error."""
    streaming: bool = False
    """A task set that is read from front to back, as its rows are needed."""
    query: SqlQuery | None = None
    """Of the rows of a database; then the split does not count."""


def dataset_spec(config: TasksetConfig | ExperienceBufferConfig, path: str | None = None) -> DatasetSpec:
    """What the configuration says to read; from `path` in place of its own where one is given."""
    named = path or config.path
    assert named is not None
    skip, streaming, query = False, False, None
    if isinstance(config, TasksetConfig):
        skip, streaming = config.on_bad_row == "skip", config.streaming
        if config.storage_type == "sql":
            query = SqlQuery(named, config.query or "", config.order_by or "")
    return DatasetSpec(
        named, config.subset_name, config.split, config.limit,
        skip_bad_rows=skip, streaming=streaming, query=query,
    )  # fmt: skip


class Source:
    """Rows of a split. A row's number is its place in the split's files, whatever slice of them is read."""

    def __init__(self, spec: DatasetSpec) -> None:
        self.name = spec.path
        self._rows, bounds = _open(spec)
        numbers = np.concatenate([np.arange(start, stop) for start, stop in bounds])
        self.numbers = numbers[: spec.limit]
        """The number of each row that is read, in the order of the split."""
        self.num_rows = len(self.numbers)

    def rows(self, places: Sequence[int]) -> Iterator[Row]:
        """The rows at these places of the split, in this order, one at a time."""
        return (self._rows[number] for number in self.row_numbers(places))

    def row_numbers(self, places: Sequence[int]) -> list[int]:
        numbers: list[int] = self.numbers[np.asarray(places, np.int64)].tolist()
        return numbers

    def numbered(self, places: Sequence[int]) -> Iterator[tuple[int, Row]]:
        """The same with their numbers."""
        return zip(self.row_numbers(places), self.rows(places), strict=True)

    def columns(self, needed: Sequence[str] = ()) -> list[str]:
        """The names of the columns; those `needed` are looked for in every row before they are missing."""
        if isinstance(self._rows, ArrowRows | CsvRows | SqlRows):
            return self._rows.columns
        head = range(min(self.num_rows, _HEAD_ROWS))
        names = dict.fromkeys(name for row in self.rows(head) for name in row)
        missing_names = set(needed) - names.keys()
        for row in self.rows(range(len(head), self.num_rows)) if missing_names else ():
            names |= dict.fromkeys(row)
            missing_names -= row.keys()
            if not missing_names:
                break
        return list(names)


class _Rows(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, number: int) -> Row: ...


def row_order(num_rows: int, *, shuffle: bool, seed: int) -> Places:
    """The order in which rows are read: as they lie, or a permutation that depends on the seed alone."""
    return np.random.default_rng(seed).permutation(num_rows) if shuffle else np.arange(num_rows)


def behind(order: Places, numbers: Places, read: Places) -> Places:
    """The places of rows that were read, −1 for those that are gone, and behind them the others in `order`.

    `numbers` are of the split's rows at their places, `read` of those that were read. With an unchanged set
    this is `order`; with another one no number comes twice and none is passed over.
    """
    sorter = np.argsort(numbers, kind="stable")
    places = sorter[np.minimum(np.searchsorted(numbers, read, sorter=sorter), len(numbers) - 1)]
    is_there = numbers[places] == read
    rest = order[~np.isin(order, places[is_there])]
    return np.concatenate([np.where(is_there, places, -1), rest])


def _open(spec: DatasetSpec) -> tuple[_Rows, list[tuple[int, int]]]:
    """The rows, and which of them the split names."""
    if spec.query is not None:
        answer = SqlRows(spec.query, limit=spec.limit)
        return answer, [(0, len(answer))]
    path = Path(spec.path).expanduser()
    if not path.exists():
        if not looks_like_a_hub_id(spec.path):
            raise ConfigError(f"{spec.path}: no such file or folder; seen from {Path.cwd()}")
        rows = ArrowRows(load(spec.path, spec.split, spec.path, spec.subset_name, split=spec.split))
        return rows, [(0, len(rows))]
    terms = split_files(path, spec.subset_name, spec.split)
    files = {part.name: files for part, files in terms} if not path.is_file() else {"": terms[0][1]}
    opened = {name: _read(each, spec) for name, each in files.items()}
    firsts = dict(zip(opened, np.cumsum([0, *map(len, opened.values())]).tolist(), strict=False))
    bounds = []
    for part, _ in terms:
        name = "" if path.is_file() else part.name
        start, stop = part.bounds(len(opened[name]))
        bounds.append((firsts[name] + start, firsts[name] + stop))
    ordered = sorted(each for each in bounds if each[0] < each[1])
    if any(one[1] > other[0] for one, other in pairwise(ordered)):
        raise ConfigError(f"found split {spec.split!r}, which names rows twice; name each row once")
    return _Several(list(opened.values())) if len(opened) > 1 else next(iter(opened.values())), bounds


class _Several:
    """The rows of one split behind those of another."""

    def __init__(self, parts: Sequence[_Rows]) -> None:
        self._parts, self._firsts = parts, [0, *accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, number: int) -> Row:
        part = bisect_right(self._firsts, number) - 1
        return self._parts[part][number - self._firsts[part]]


def _read(files: Sequence[Path], spec: DatasetSpec) -> _Rows:
    kind = format_of(files[0])
    if kind == "json":
        return JsonRows(files, skip_bad_rows=spec.skip_bad_rows)
    if kind == "csv":
        return CsvRows(files)
    assert kind is not None
    return ArrowRows(load(spec.path, spec.split, kind, data_files=parquet_names(files), split="train"))
