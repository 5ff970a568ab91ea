"""Closed tails become Parquet in the background; nobody waits for it.

The Parquet file is durable under its own name before the ledger points to it, and the tail goes only after that.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
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

_ROW_GROUP_BYTES = 4 << 20
_ROW_GROUP_ROWS = 122_880
_log = logging.getLogger(__name__)


class Sealer:
    """One thread that seals tails in the order they were closed."""

    def __init__(
        self, root: Path, submit: Callable[[Work], Future[None]], forget: Callable[[int], None]
    ) -> None:
        self._root, self._submit, self._forget = root, submit, forget
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
        sealed = write_sealed(self._root, segment, rows)

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


def write_sealed(root: Path, segment: Segment, rows: pa.Table) -> Segment:
    """Writes `rows` as the Parquet file of `segment`; it is complete and durable on return."""
    target = (root / segment.file).with_suffix(".parquet")
    partial = target.with_suffix(".parquet.tmp")
    per_group = max(1, rows.num_rows * _ROW_GROUP_BYTES // max(rows.nbytes, 1))
    pq.write_table(
        rows,
        partial,
        compression="zstd",
        row_group_size=min(per_group, _ROW_GROUP_ROWS),
        write_page_checksum=True,
    )
    num_bytes = partial.stat().st_size
    checksum = file_checksum(partial, num_bytes)
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(partial, target)
    fsync_folder(target.parent)
    file = str(Path(segment.file).with_suffix(".parquet"))
    return replace(segment, kind=SEALED, file=file, num_bytes=num_bytes, checksum=checksum)
