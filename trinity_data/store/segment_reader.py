"""Rows of segments as Arrow tables, without copies where the file allows it.

What the ledger named is what is read: no file is trusted for its length or its content.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from trinity_data.errors import StoreError, did_you_mean
from trinity_data.schema import STORED
from trinity_data.store.segments import PARTS_OF_GROUP, SEALED, Segment, check_size, num_row_groups
from trinity_data.store.tail import TailReader, tail_parts

_ATTEMPTS = 10
_DECODED_GROUPS = 4
_Numbers = npt.NDArray[np.int64]
_T = TypeVar("_T")
_Rows = TypeVar("_Rows", "pa.Table", "pa.RecordBatch")


class SegmentVanishedError(Exception):
    """A file was replaced between reading the ledger and opening it.

    A fresh look at the ledger finds the new one.
    """

    def __init__(self, segment: Segment) -> None:
        super().__init__(segment.file)
        self.segment = segment


def retry_if_moved(attempt: Callable[[], _T]) -> _T:
    """Tries again when a file was sealed or merged between looking into the ledger and opening it."""
    for _ in range(_ATTEMPTS):
        try:
            return attempt()
        except SegmentVanishedError as vanished:
            gone = vanished.segment
    raise gone.damaged("the file is gone")


class SegmentFiles:
    """Opens segments of one store and keeps the tails mapped. Safe to share between threads."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._tails: dict[int, TailReader] = {}
        self._decoded: OrderedDict[tuple[str, int, tuple[str, ...]], pa.RecordBatch] = OrderedDict()
        self._bounds: dict[tuple[str, str], list[tuple[float, float]]] = {}

    def whole(self, segment: Segment, columns: Sequence[str] | None = None) -> pa.Table:
        """All rows of a segment."""
        names = _known_columns(segment.table, columns)
        with self.opening(segment):
            if segment.kind == SEALED:
                file = self._parquet(segment)
                return _in_schema(segment.table, file.read(columns=_present(names, file.schema_arrow)), names)
            table = self._tail(segment).table(segment, STORED[segment.table])
            return _in_schema(segment.table, table, names)

    def around(
        self, segment: Segment, column: str, lowest: int, highest: int, columns: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        """The parts of a segment that may hold rows whose `column` lies within these bounds, whole; a part is
        a row group of a file, or a batch of a tail.
        """
        names = _known_columns(segment.table, columns)
        with self.opening(segment):
            if segment.kind == SEALED:
                file = self._parquet(segment)
                for number, (low, high) in enumerate(self._bounds_of_groups(segment, file, column)):
                    if low <= highest and high >= lowest:
                        yield self._row_group(segment, file, number, names)
            else:
                # mapped, so that a batch costs nothing before it is looked at
                for batch in self._tail(segment).batches(segment)[0]:
                    yield _in_schema(segment.table, batch, names)

    def _bounds_of_groups(
        self, segment: Segment, file: pq.ParquetFile, column: str
    ) -> list[tuple[float, float]]:
        """The lowest and the highest number of a column in each row group, as far as the file says."""
        key = (segment.file, column)
        if key not in self._bounds:
            self._bounds[key] = [
                _bounds_of(file.metadata.row_group(number), column) for number in range(file.num_row_groups)
            ]
        return self._bounds[key]

    def parts(self, segment: Segment, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """All rows of a segment in small pieces: `PARTS_OF_GROUP` or more make a row group."""
        names = _known_columns(segment.table, columns)
        with self.opening(segment):
            if segment.kind == SEALED:
                parts = self._sealed_parts(segment, names)
            else:
                num_groups = num_row_groups(segment.num_rows, segment.num_bytes)
                parts = tail_parts(self._root, segment, num_groups * PARTS_OF_GROUP)
            for part in parts:
                yield _in_schema(segment.table, part, names)

    def _sealed_parts(self, segment: Segment, names: list[str]) -> Iterator[pa.Table]:
        file = self._parquet(segment)
        present = _present(names, file.schema_arrow)
        for number in range(file.num_row_groups):
            num_rows = -(-file.metadata.row_group(number).num_rows // PARTS_OF_GROUP)
            for batch in file.iter_batches(num_rows, [number], present, use_threads=False):
                yield pa.Table.from_batches([batch])

    def rows(
        self, segments: Sequence[Segment], rows: _Numbers, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """The rows of these numbers, in this order, from the segments that hold them."""
        names = _known_columns(segments[0].table, columns)
        batches: list[pa.RecordBatch] = []
        sources, offsets = np.empty_like(rows), np.empty_like(rows)
        for segment in segments:
            places = np.flatnonzero((rows >= segment.first_row) & (rows < segment.end_row))
            if len(places):
                local = rows[places] - segment.first_row
                with self.opening(segment):
                    of_segment, source, offset = self._batches_with(segment, local, names)
                sources[places], offsets[places] = source + len(batches), offset
                batches += of_segment
        return gather(batches, sources, offsets)

    def forget(self, segment: Segment) -> None:
        """Lets go of a tail that was sealed; what was read from it stays valid."""
        with self._lock:
            self._tails.pop(segment.number, None)

    def _batches_with(
        self, segment: Segment, local: _Numbers, names: list[str]
    ) -> tuple[list[pa.RecordBatch], _Numbers, _Numbers]:
        """Batches that hold the rows, and for each row its batch and the place in it."""
        if segment.kind == SEALED:
            file = self._parquet(segment)
            groups = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
            ends = np.cumsum(np.array(groups, np.int64))
        else:
            mapped, tail_ends = self._tail(segment).batches(segment)
            ends = np.array(tail_ends, np.int64)
        holder = np.searchsorted(ends, local, side="right")
        needed, source = np.unique(holder, return_inverse=True)
        starts = np.concatenate([[0], ends[:-1]])
        batches = [
            self._row_group(segment, file, number, names)
            if segment.kind == SEALED
            else _in_schema(segment.table, mapped[number], names)
            for number in needed.tolist()
        ]
        return batches, source.astype(np.int64), local - starts[holder]

    def _tail(self, segment: Segment) -> TailReader:
        with self._lock:
            if segment.number not in self._tails:
                # where another process seals, nobody says which tails are gone
                self._tails = {number: tail for number, tail in self._tails.items() if tail.exists()}
                self._tails[segment.number] = TailReader(self._root / segment.file)
            return self._tails[segment.number]

    def _row_group(
        self, segment: Segment, file: pq.ParquetFile, number: int, names: list[str]
    ) -> pa.RecordBatch:
        """A decoded row group; the next batch usually wants the same one again."""
        key = (segment.file, number, tuple(names))
        with self._lock:
            if key in self._decoded:
                self._decoded.move_to_end(key)
                return self._decoded[key]
        rows = file.read_row_group(number, columns=_present(names, file.schema_arrow))
        (batch,) = _in_schema(segment.table, rows, names).combine_chunks().to_batches()
        with self._lock:
            self._decoded[key] = batch
            if len(self._decoded) > _DECODED_GROUPS:
                self._decoded.popitem(last=False)
        return batch

    def _parquet(self, segment: Segment) -> pq.ParquetFile:
        check_size(self._root, segment)
        return pq.ParquetFile(self._root / segment.file, memory_map=True, page_checksum_verification=True)

    @contextmanager
    def opening(self, segment: Segment) -> Iterator[None]:
        """Tells a file that was replaced since from one that is damaged."""
        try:
            yield
        except StoreError:
            if not (self._root / segment.file).exists():
                raise SegmentVanishedError(segment) from None
            raise
        except FileNotFoundError:
            raise SegmentVanishedError(segment) from None
        # a name in a Parquet footer that was damaged may be no text
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise segment.damaged(str(error)) from error


def _bounds_of(group: pq.RowGroupMetaData, column: str) -> tuple[float, float]:
    for number in range(group.num_columns):
        leaf = group.column(number)
        if leaf.path_in_schema == column and (found := leaf.statistics) is not None and found.has_min_max:
            return cast("tuple[float, float]", (found.min, found.max))
    return -math.inf, math.inf


def gather(batches: Sequence[pa.RecordBatch], sources: _Numbers, offsets: _Numbers) -> pa.Table:
    """Row `offsets[i]` of batch `sources[i]` for each i: slices where rows lie together, else one copy."""
    breaks = np.flatnonzero((np.diff(sources) != 0) | (np.diff(offsets) != 1)) + 1
    starts = np.concatenate([[0], breaks])
    lengths = np.diff(np.concatenate([starts, [len(sources)]]))
    if len(starts) <= max(32, len(sources) // 4):
        return pa.Table.from_batches(
            [
                batches[sources[start]].slice(offsets[start], length)
                for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
            ]
        )
    taken, places = [], []
    for source, batch in enumerate(batches):
        of_batch = np.flatnonzero(sources == source)
        taken.append(batch.take(offsets[of_batch]))
        places.append(of_batch)
    order = np.argsort(np.concatenate(places), kind="stable")
    return pa.Table.from_batches(taken).combine_chunks().take(order)


def _known_columns(table: str, columns: Sequence[str] | None) -> list[str]:
    names = STORED[table].names
    for column in columns or ():
        if column not in names:
            raise StoreError(f"table {table!r} has no column {column!r}{did_you_mean(column, names)}")
    return list(names if columns is None else columns)


def _present(names: list[str], schema: pa.Schema) -> list[str]:
    return [name for name in names if name in schema.names]


def _in_schema(name: str, rows: _Rows, names: list[str]) -> _Rows:
    """`rows` with these columns; one that an older file lacks is null."""
    schema = pa.schema([STORED[name].field(column) for column in names])
    if rows.schema.equals(schema, check_metadata=False):
        return rows.replace_schema_metadata(None)
    columns: list[Any] = [
        rows.column(field.name) if field.name in rows.schema.names else pa.nulls(rows.num_rows, field.type)
        for field in schema
    ]
    return type(rows).from_arrays(columns, schema=schema)
