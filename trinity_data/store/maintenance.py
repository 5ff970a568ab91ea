"""Closed tails become Parquet in the background, and small Parquet files large ones; nobody waits for it.

The Parquet file is durable under its own name before the ledger points to it, and the tail goes only after
that. The name carries the writer's epoch, so that a fenced writer cannot touch the files of the one that
replaced it.

Small sealed files become few large ones, so that a store has a bounded number of files however it was
written. The rows keep their numbers. A crash in between leaves files that the ledger does not name,
which the next opening removes.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa

from trinity_data.errors import StoreError, StoreLockedError
from trinity_data.schema import STORED
from trinity_data.store.denormalize import KEYS, final_columns, num_final
from trinity_data.store.parquet import write_sealed
from trinity_data.store.reader import StoreReader
from trinity_data.store.retention import is_expired
from trinity_data.store.segment_reader import SegmentFiles, SegmentVanishedError
from trinity_data.store.segments import SEALED, SEGMENTS_FOLDER, Segment, check_content, replace_segment
from trinity_data.store.writer import Changes, Writer, record_segments

_log = logging.getLogger(__name__)

# a tail never waits for a merge that has not begun
_STOP, _SEAL, _MERGE, _END = range(4)
_Job = tuple[int, int, Segment | str | threading.Event]


class Maintenance:
    """One thread that seals tails in the order they were closed, and merges small files when no tail waits.

    The newest closed tail of experiences waits for the next one:
    by then it can be said what became of its rows.
    """

    def __init__(self, store: StoreReader, *, epoch: int) -> None:
        self._store, self._root, self._epoch = store, store.root, epoch
        self._jobs: queue.PriorityQueue[_Job] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._held: Segment | None = None
        self._kept_files: frozenset[str] = frozenset()
        """Files that are not written again: damaged ones, and those that would not be better for it."""
        self._thread = threading.Thread(target=self._run, name="store-sealer", daemon=True)

    def start(self, writer: Writer, closed: list[Segment], tables: Iterable[str]) -> None:
        """Seals what an earlier process closed, and merges small files of `tables`."""
        self._writer = writer
        self.add(closed)
        for table in tables:
            self.merge(table)
        self._thread.start()
        atexit.register(self._stop)

    def add(self, segments: list[Segment]) -> None:
        for segment in segments:
            self._jobs.put((_SEAL, next(self._numbers), segment))

    def merge(self, table: str) -> None:
        """Merges what is small, when nothing else is to be done."""
        self._jobs.put((_MERGE, next(self._numbers), table))

    def wait(self) -> None:
        """Returns when everything that was closed so far is sealed or has failed."""
        sealed = threading.Event()
        self._jobs.put((_SEAL, next(self._numbers), sealed))
        sealed.wait()

    def close(self) -> None:
        """Seals what is closed and merges what is due, then ends the thread."""
        for kind in (_SEAL, _END):
            self._jobs.put((kind, next(self._numbers), threading.Event()))
        self._thread.join()
        atexit.unregister(self._stop)

    def _stop(self) -> None:
        """At the exit of a process that did not close its store:
        a thread that is cut off inside DuckDB aborts it.
        """
        if self._thread.is_alive():  # not in a fork
            self._jobs.put((_STOP, next(self._numbers), threading.Event()))
            self._thread.join()

    def _run(self) -> None:
        kind = _SEAL
        while kind not in (_STOP, _END):
            kind, _, subject = self._jobs.get()
            if isinstance(subject, str):
                with _logging_failure(f"merge files of {subject!r}"):
                    self._merge(subject)
            elif isinstance(subject, Segment):
                self._seal_next(subject)
            elif kind == _SEAL:
                self._seal_next(None)
                subject.set()

    def _seal_next(self, closed: Segment | None) -> None:
        """Seals the tail that was closed, or of experiences the one before it.

        For None the one that waits.
        """
        segment = closed
        if closed is None or closed.table == "experiences":
            segment, self._held = self._held, closed
        if segment is not None:
            with _logging_failure(f"seal {segment.file}"):  # the tail is tried again at the next start
                self._seal(segment)
            self.merge(segment.table)

    def _seal(self, segment: Segment) -> None:
        files, final = SegmentFiles(self._root), None
        if segment.table == "experiences":
            final = final_columns(self._root, _keys(files, [segment]))
        parts = files.parts(segment)
        sealed = write_sealed(
            self._root, segment, parts, STORED[segment.table], epoch=self._epoch, final=final
        )

        def swap(changes: Changes) -> None:
            if not replace_segment(changes.ledger, segment, sealed):
                raise StoreError(f"segment {segment.file} is not waiting to be sealed")

        self._writer.submit(swap).result()
        self._store.forget(segment)
        os.unlink(self._root / segment.file)

    def _merge(self, table: str) -> None:
        while segments := self._due(table):
            try:
                final = None
                if table == "experiences":
                    final = final_columns(self._root, _keys(SegmentFiles(self._root), segments))
                if final is not None and len(segments) == 1 and num_final(final) < final.num_rows:
                    self._kept_files |= {segments[0].file}  # it would say no more than before
                    continue
                planned, parts = merge(self._root, segments)
                merged = write_sealed(
                    self._root, planned, parts, STORED[table], epoch=self._epoch, final=final
                )
            except StoreError:
                # reported once, and not tried again
                self._kept_files |= {segment.file for segment in segments}
                raise
            self._writer.submit(partial(swap, segments=segments, merged=merged)).result()
            for segment in segments:
                os.unlink(self._root / segment.file)

    def _due(self, table: str) -> list[Segment]:
        """What should be one file; rows that lost their contents stay apart from those that may lose them.

        Also a file that does not say yet what became of its rows, though all have ended.
        """
        ranges = self._store.expired()
        of_table = [segment for segment in self._store.segments() if segment.table == table]
        for _, alike in itertools.groupby(of_table, lambda segment: is_expired(segment, ranges)):
            if segments := pick_for_compaction(list(alike), self._kept_files):
                return segments
        for segment in of_table if table == "experiences" else ():
            path = self._root / segment.file
            if (
                segment.kind == SEALED
                and segment.file not in self._kept_files
                and segment.num_final < segment.num_rows
                and self._store.have_ended(segment.first_row, segment.end_row)
                and path.exists()
                and path.stat().st_nlink == 1  # a branch shares it
            ):
                return [segment]
        return []


def _keys(files: SegmentFiles, segments: Iterable[Segment]) -> pa.Table:
    """What `final_columns` needs of the rows."""
    return pa.concat_tables(part for segment in segments for part in files.parts(segment, KEYS))


@contextmanager
def _logging_failure(what: str) -> Iterator[None]:
    """Files stay as they were, and readers need not know."""
    try:
        yield
    except StoreLockedError as error:
        _log.info("did not %s: %s", what, error)
    except (OSError, pa.ArrowException, SegmentVanishedError) as error:
        _log.warning("could not %s: %s", what, error)
    except Exception:  # the boundary of the thread: a caller that waits must not wait without end
        _log.exception("could not %s", what)


# a file of this size is left alone; two smaller ones make at most twice of it
ENOUGH_BYTES = 16 << 20
FEW = 8


def pick_for_compaction(
    segments: Sequence[Segment], kept_files: frozenset[str] = frozenset()
) -> list[Segment]:
    """The neighbours of a table that should be one file now, or none.

    `segments` are all of the table's, in order. A file is merged with those behind it when together they
    outweigh it, so that a row is written again at most once for each doubling, and a table has no more small
    files than `FEW` and the binary logarithm of `ENOUGH_BYTES`. `kept_files` stay as they are.
    """
    for run, ended in _runs(segments, kept_files):
        for number, first in enumerate(run):
            behind = sum(segment.num_bytes for segment in run[number + 1 :])
            outweighed = len(run) - number >= FEW and first.num_bytes <= behind
            enough = len(run) - number > 1 and first.num_bytes + behind >= ENOUGH_BYTES
            if outweighed or enough or (ended and len(run) > 1):
                # no more than make a file large enough
                sizes = list(itertools.accumulate(segment.num_bytes for segment in run[number:]))
                num_files = 2 + sum(size < ENOUGH_BYTES for size in sizes[1:])
                return run[number : number + num_files]
    return []


def merge(root: Path, segments: Sequence[Segment]) -> tuple[Segment, Iterator[pa.Table]]:
    """What the one segment will be called, and its rows piece by piece. A damaged file is refused."""
    for segment in segments:
        check_content(root, segment)
    first, last = segments[0], segments[-1]
    # no two merges that begin with one number end with the same
    file = f"{SEGMENTS_FOLDER}/{first.table}/{first.number:08d}-{last.number:08d}.merged"
    rows = sum(segment.num_rows for segment in segments)
    files = SegmentFiles(root)
    return replace(first, file=file, num_rows=rows), (
        part for segment in segments for part in files.parts(segment)
    )


def swap(changes: Changes, segments: Sequence[Segment], merged: Segment) -> None:
    """Names the merged file in place of the others, or refuses when they are not what they were."""
    removed = changes.ledger.executemany(
        "DELETE FROM segments WHERE segment = ? AND file = ? AND kind = ?",
        [(segment.number, segment.file, SEALED) for segment in segments],
    )
    if removed.rowcount != len(segments):
        raise StoreError(f"the files that became {merged.file} have changed meanwhile")
    record_segments(changes.ledger, [merged])


def _runs(segments: Sequence[Segment], kept_files: frozenset[str]) -> Iterator[tuple[list[Segment], bool]]:
    """Small sealed neighbours, and whether a file that will stay as it is follows them."""
    run: list[Segment] = []
    for segment in segments:
        if segment.kind == SEALED and segment.num_bytes < ENOUGH_BYTES and segment.file not in kept_files:
            run.append(segment)
        else:
            yield run, segment.kind == SEALED
            run = []
    yield run, False
