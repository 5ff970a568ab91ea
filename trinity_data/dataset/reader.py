"""Rows of task sets and of training data by number, from files or the hub.

JSON and CSV are read here, as they are written; Parquet and the hub come through `datasets`.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trinity_data.config import ExperienceBufferConfig, TasksetConfig
from trinity_data.config.hub import looks_like_a_hub_id
from trinity_data.dataset.files import format_of, split_files
from trinity_data.dataset.row import Row
from trinity_data.dataset.sql_rows import SqlQuery, SqlRows
from trinity_data.dataset.text_files import CsvRows, JsonRows
from trinity_data.errors import ConfigError, TrinityError

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
    query: SqlQuery | None = None
    """Of the rows of a database; then the split does not count."""


def dataset_spec(config: TasksetConfig | ExperienceBufferConfig, path: str | None = None) -> DatasetSpec:
    """What the configuration says to read; from `path` in place of its own where one is given."""
    named = path or config.path
    assert named is not None
    skip, query = False, None
    if isinstance(config, TasksetConfig):
        skip = config.on_bad_row == "skip"
        if config.storage_type == "sql":
            query = SqlQuery(named, config.query or "", config.order_by or "")
    return DatasetSpec(named, config.subset_name, config.split, config.limit, skip_bad_rows=skip, query=query)


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
        return (self._rows[int(self.numbers[place])] for place in places)

    def row_numbers(self, places: Sequence[int]) -> list[int]:
        return [int(number) for number in self.numbers[list(places)]]

    def columns(self, needed: Sequence[str] = ()) -> list[str]:
        """The names of the columns; those `needed` are looked for in every row before they are missing."""
        if isinstance(self._rows, _Table | CsvRows | SqlRows):
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


class _Table:
    """The rows of a data set of `datasets`."""

    def __init__(self, rows: Any) -> None:
        self.columns: list[str] = rows.column_names
        self._rows = rows.with_format("arrow")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Row:
        table: pa.Table = self._rows[[number]]
        row: Row = table.to_pylist()[0]
        for field in table.schema:
            # a value of 32 bits as the number that was written, not as its nearest of 64
            if pa.types.is_float32(field.type) and row[field.name] is not None:
                row[field.name] = float(str(np.float32(row[field.name])))
        return row


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
        rows = _loaded(spec, spec.path, spec.subset_name, split=spec.split)
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
        self._parts, self._firsts = parts, np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, number: int) -> Row:
        part = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return self._parts[part][number - int(self._firsts[part])]


def _read(files: Sequence[Path], spec: DatasetSpec) -> _Rows:
    kind = format_of(files[0])
    if kind == "json":
        return JsonRows(files, skip_bad_rows=spec.skip_bad_rows)
    if kind == "csv":
        return CsvRows(files)
    assert kind is not None
    # `datasets` reads a path as a pattern, and what stands before a colon as a protocol
    names = [glob.escape(str(file.absolute())) for file in files]
    return _loaded(spec, kind, data_files=names, split="train")


def _loaded(spec: DatasetSpec, *named: str | None, **options: Any) -> _Table:
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    try:
        return _Table(load_dataset(*named, trust_remote_code=False, **options))
    except TrinityError:
        raise
    # the boundary to `datasets`, which raises what its readers raise, StopIteration too
    except Exception as error:
        problem, cause = type(error).__name__, cast("BaseException | None", error)
        while cause is not None:
            if str(cause):
                problem = f"{type(cause).__name__}: {cause}"
            cause = cause.__cause__ or cause.__context__
        raise ConfigError(f"{spec.path}: split {spec.split!r} cannot be read: {problem}") from error
