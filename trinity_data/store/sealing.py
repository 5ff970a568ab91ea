"""Closed tails become Parquet in the background; nobody waits for it.

The Parquet file is durable under its own name before the ledger points to it, and the tail goes only after that. The
name carries the writer's epoch, so that a fenced writer cannot touch the files of the one that replaced it.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from trinity_data.errors import StoreError, StoreLockedError
from trinity_data.store.segments import SEALED, Segment, file_checksum, fsync_folder
from trinity_data.store.tables import STORED
from trinity_data.store.tail import TailReader
from trinity_data.store.writer import Changes, Work

_ROW_GROUP_BYTES = 8 << 20
_ROW_GROUP_ROWS = 122_880
_TOKENS = "token_ids.list.element"
_TEXTS = frozenset({"content", "response_text", "prompt", "info", "tools", "message"})
_log = logging.getLogger(__name__)


class Sealer:
    """One thread that seals tails in the order they were closed."""

    def __init__(
        self,
        root: Path,
        submit: Callable[[Work], Future[None]],
        forget: Callable[[int], None],
        *,
        epoch: int,
    ) -> None:
        self._root, self._submit, self._forget, self._epoch = root, submit, forget, epoch
        self._closed: queue.SimpleQueue[Segment | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._waiting = 0
        self._thread = threading.Thread(target=self._run, name="store-sealer", daemon=True)
        self._thread.start()

    def add(self, segments: list[Segment]) -> None:
        with self._idle:
            self._waiting += len(segments)
        for segment in segments:
            self._closed.put(segment)

    def wait(self) -> None:
        """Returns when everything that was closed so far is sealed or has failed."""
        with self._idle:
            self._idle.wait_for(lambda: self._waiting == 0)

    def close(self) -> None:
        """Seals what is closed, then ends the thread."""
        self._closed.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (segment := self._closed.get()) is not None:
            try:
                self._seal(segment)
            except StoreLockedError as error:
                _log.info("not sealed: %s", error)
            except (
                OSError,
                pa.ArrowException,
            ) as error:  # the tail stays and is tried again at the next start
                _log.warning("could not seal %s: %s", segment.file, error)
            finally:
                with self._idle:
                    self._waiting -= 1
                    self._idle.notify_all()

    def _seal(self, segment: Segment) -> None:
        rows = TailReader(self._root / segment.file).table(segment, STORED[segment.table])
        sealed = write_sealed(self._root, segment, rows, epoch=self._epoch)

        def swap(changes: Changes) -> None:
            swapped = changes.ledger.execute(
                "UPDATE segments SET kind = ?, file = ?, num_bytes = ?, checksum = ? "
                "WHERE segment = ? AND kind = 'closed'",
                (SEALED, sealed.file, sealed.num_bytes, sealed.checksum, segment.number),
            )
            if swapped.rowcount != 1:
                raise StoreError(f"segment {segment.file} is not waiting to be sealed")

        self._submit(swap).result()
        self._forget(segment.number)
        os.unlink(self._root / segment.file)


def write_sealed(root: Path, segment: Segment, rows: pa.Table, *, epoch: int) -> Segment:
    """Writes `rows` as the Parquet file of `segment`; it is complete and durable on return."""
    target = (root / segment.file).with_suffix(f".{epoch}.parquet")
    partial = target.with_suffix(".parquet.tmp")
    try:
        _write_parquet(rows, partial)
        num_bytes = partial.stat().st_size
        checksum = file_checksum(partial, num_bytes)
        descriptor = os.open(partial, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)  # on a full disk half a file is in everybody's way
        raise
    fsync_folder(target.parent)
    file = str(target.relative_to(root))
    return replace(segment, kind=SEALED, file=file, num_bytes=num_bytes, checksum=checksum)


def _write_parquet(rows: pa.Table, path: Path) -> None:
    per_group = max(1, rows.num_rows * _ROW_GROUP_BYTES // max(rows.nbytes, 1))
    pq.write_table(
        rows,
        path,
        compression="zstd",
        row_group_size=min(per_group, _ROW_GROUP_ROWS),
        write_page_checksum=True,
        use_dictionary=[name for name, kind in _leaves(rows.schema) if _repeats(name, kind)],
        column_encoding={
            name: "BYTE_STREAM_SPLIT" for name, kind in _leaves(rows.schema) if pa.types.is_float32(kind)
        },
    )


def _repeats(name: str, kind: pa.DataType) -> bool:
    """Whether a Parquet dictionary makes a column smaller: names and tokens repeat, texts and numbers do not."""
    return name == _TOKENS or (pa.types.is_string(kind) and name.split(".")[-1] not in _TEXTS)


def _leaves(fields: Iterable[pa.Field], prefix: str = "") -> Iterator[tuple[str, pa.DataType]]:
    """The columns that Parquet makes of nested ones, by its own names for them."""
    for field in fields:
        name, kind = prefix + field.name, field.type
        if pa.types.is_struct(kind):
            yield from _leaves(kind, f"{name}.")
        elif pa.types.is_map(kind):
            yield from ((f"{name}.key_value.key", kind.key_type), (f"{name}.key_value.value", kind.item_type))
        elif pa.types.is_list(kind):
            yield from _leaves([kind.value_field.with_name("element")], f"{name}.list.")
        else:
            yield name, kind
