"""The hot tail of a table: one Arrow stream that only grows.

Bytes count once the ledger names them; what lies beyond is overwritten by the next append
and cut when the store opens.
"""

from __future__ import annotations

import bisect
import logging
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from trinity_data.atomic import fsync_path
from trinity_data.errors import StoreError
from trinity_data.store.segments import CLOSED, SEGMENTS_FOLDER, TAIL, Segment, check_content, file_size
from trinity_data.write_at import write_at

_log = logging.getLogger(__name__)

_BATCH_BYTES = 8 << 20
# files grow in sparse steps, so that a reader need not map a tail anew after every commit
_RESERVED_BYTES = 4 << 20


class TailWriter:
    """Appends to one tail. Nothing here is believed until `confirm`, which follows the ledger's commit."""

    def __init__(self, root: Path, segment: Segment, *, num_batches: int = 0) -> None:
        self.segment = segment
        self.num_batches = num_batches
        self._descriptor = os.open(root / segment.file, os.O_WRONLY | os.O_NOFOLLOW)
        self._reserved = os.fstat(self._descriptor).st_size

    @classmethod
    def create(cls, root: Path, number: int, table: str, first_row: int, schema: pa.Schema) -> TailWriter:
        """A new stream that holds its schema alone; the file and its name are durable on return."""
        file = f"{SEGMENTS_FOLDER}/{table}/{number:08d}.arrows"
        folder = (root / file).parent
        folder.mkdir(exist_ok=True)
        fsync_path(folder.parent)  # also when it was there: its maker may have been killed before this
        header = schema.serialize().to_pybytes()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        descriptor = os.open(root / file, flags, 0o644)
        try:
            write_at(descriptor, header, 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        fsync_path(folder)
        segment = Segment(number, table, TAIL, file, first_row, 0, len(header), zlib.crc32(header))
        return cls(root, segment)

    @classmethod
    def reopen(cls, root: Path, segment: Segment, schema: pa.Schema) -> TailWriter | None:
        """The tail, cut to what the ledger knows; None when it is damaged or has another schema,
        and cannot grow on.
        """
        try:
            batches, _ = TailReader(root / segment.file).batches(segment)
        except (StoreError, FileNotFoundError) as error:
            _log.warning("%s", error)
            return None
        if not batches[0].schema.equals(schema, check_metadata=False):
            return None
        tail = cls(root, segment, num_batches=len(batches))
        os.ftruncate(tail._descriptor, segment.num_bytes)
        os.fsync(tail._descriptor)
        tail._reserved = segment.num_bytes
        return tail

    def append(self, batches: list[pa.RecordBatch]) -> Segment:
        """The segment as it is with these rows at its end; they are written, and on disk after `sync`."""
        offset, checksum = self.segment.num_bytes, self.segment.checksum
        for batch in batches:
            message = batch.serialize()
            if (end := offset + message.size) > self._reserved:
                self._reserved = -(-end // _RESERVED_BYTES) * _RESERVED_BYTES
                os.ftruncate(self._descriptor, self._reserved)
            write_at(self._descriptor, message, offset)
            offset = end
            checksum = zlib.crc32(message, checksum)
        return replace(
            self.segment,
            num_rows=self.segment.num_rows + sum(batch.num_rows for batch in batches),
            num_bytes=offset,
            checksum=checksum,
        )

    def sync(self) -> None:
        """Returns when what was appended survives a power cut."""
        os.fdatasync(self._descriptor)

    def confirm(self, segment: Segment, *, num_batches: int) -> None:
        """The ledger has committed: the next append goes behind these rows."""
        self.segment = segment
        self.num_batches += num_batches

    def close(self) -> None:
        os.close(self._descriptor)


class TailReader:
    """The record batches of a tail, mapped from its file without copies; follows the tail as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._content: pa.Buffer | None = None
        self._batches: list[pa.RecordBatch] = []
        self._ends: list[int] = []
        self._num_bytes = 0
        self._checksum = 0

    def exists(self) -> bool:
        """Whether its file still has its name."""
        return self._path.exists()

    def batches(self, segment: Segment) -> tuple[list[pa.RecordBatch], list[int]]:
        """Batches of the segment, and the rows at which they end."""
        with self._lock:
            if segment.num_bytes > self._num_bytes:
                self._extend(segment)
            number = bisect.bisect_right(self._ends, segment.num_rows)
            return self._batches[:number], self._ends[:number]

    def table(self, segment: Segment, schema: pa.Schema) -> pa.Table:
        """Exactly the rows of `segment`."""
        batches, _ = self.batches(segment)
        return pa.Table.from_batches(batches, schema=batches[0].schema if batches else schema)

    def _extend(self, segment: Segment) -> None:
        if self._content is None or self._content.size < segment.num_bytes:
            self._content = self._map(segment)
        added = self._content.slice(self._num_bytes, segment.num_bytes - self._num_bytes)
        checksum = zlib.crc32(added, self._checksum)
        if checksum != segment.checksum:
            # parsing it could crash the process
            raise segment.damaged(f"its checksum is {checksum:08x}, the ledger says {segment.checksum:08x}")
        schema = pa.ipc.read_schema(self._content)
        messages = pa.BufferReader(added)
        if not self._num_bytes:
            pa.ipc.read_message(messages)  # the schema
        while messages.tell() < added.size:
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(messages), schema)
            self._batches.append(batch)
            self._ends.append((self._ends[-1] if self._ends else 0) + batch.num_rows)
        self._num_bytes, self._checksum = segment.num_bytes, checksum

    def _map(self, segment: Segment) -> pa.Buffer:
        file_size(self._path)  # refuses a link
        with pa.memory_map(str(self._path)) as file:
            if file.size() < segment.num_bytes:
                raise segment.damaged(f"it has {file.size():,} bytes, the ledger says {segment.num_bytes:,}")
            return file.read_buffer(file.size())


def tail_parts(root: Path, segment: Segment, num_parts: int) -> Iterator[pa.Table]:
    """All rows of a tail in so many pieces of about one size, or fewer.

    Read, not mapped: what is read once would fill the process's memory with the whole file.
    """
    check_content(root, segment)
    per_part, num_read, batches = -(-segment.num_rows // num_parts), 0, list[pa.RecordBatch]()
    with pa.OSFile(str(root / segment.file), "rb") as file, pa.ipc.open_stream(file) as stream:
        # bytes behind these rows do not count
        while num_read < segment.num_rows:
            batches.append(stream.read_next_batch())
            before, num_read = num_read, num_read + batches[-1].num_rows
            if num_read // per_part > before // per_part or num_read == segment.num_rows:
                yield pa.Table.from_batches(batches)
                batches = []


@dataclass(frozen=True)
class Written:
    """A tail with rows at its end that the ledger does not name yet."""

    writer: TailWriter
    segment: Segment
    num_batches: int


class Tails:
    """The tails of all tables, written together in one commit of the ledger."""

    def __init__(self, root: Path, *, max_bytes: int, max_batches: int, next_number: int) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._max_batches = max_batches
        self._next_number = next_number
        self._writers: dict[str, TailWriter] = {}

    def adopt(self, writer: TailWriter) -> None:
        """Goes on with a tail that an earlier process left."""
        self._writers[writer.segment.table] = writer

    def write(self, rows: Mapping[str, pa.Table], first_rows: Mapping[str, int]) -> dict[str, Written]:
        """Puts rows behind those of the ledger, to be on disk after `sync`.

        Written again, they take the same place.
        """
        written: dict[str, Written] = {}
        for name, table in rows.items():
            if (writer := self._writers.get(name)) is None:
                writer = TailWriter.create(
                    self._root, self._next_number, name, first_rows.get(name, 0), table.schema
                )
                self._writers[name] = writer
                self._next_number += 1
            batches = _batches(table)
            written[name] = Written(writer, writer.append(batches), len(batches))
        return written

    def place(
        self, written: Mapping[str, Written], *, close_all: bool = False
    ) -> tuple[list[Segment], Callable[[], list[Segment]]]:
        """What the ledger must record, and what to call once it has: it names closed tails."""
        ends = list(written.values())
        if close_all:
            idle = [writer for name, writer in self._writers.items() if name not in written]
            ends += [Written(writer, writer.segment, 0) for writer in idle if writer.segment.num_rows]
        changed = []
        for each in ends:
            num_batches = each.writer.num_batches + each.num_batches
            is_full = each.segment.num_bytes >= self._max_bytes or num_batches >= self._max_batches
            kind = CLOSED if close_all or is_full else each.segment.kind
            changed.append(replace(each, segment=replace(each.segment, kind=kind)))

        def confirm() -> list[Segment]:
            for each in changed:
                each.writer.confirm(each.segment, num_batches=each.num_batches)
                if each.segment.kind == CLOSED:
                    self._writers.pop(each.segment.table).close()
            return [each.segment for each in changed if each.segment.kind == CLOSED]

        return [each.segment for each in changed], confirm

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()


def _batches(rows: pa.Table) -> list[pa.RecordBatch]:
    """One batch for small tables; of large ones, batches that can be mapped and read piece by piece."""
    per_batch = rows.num_rows or 1
    if rows.get_total_buffer_size() > _BATCH_BYTES:
        per_batch = max(1, rows.num_rows * _BATCH_BYTES // max(rows.nbytes, 1))
    return list(rows.combine_chunks().to_batches(max_chunksize=per_batch))
