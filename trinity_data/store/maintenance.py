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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa

from trinity_data.errors import StoreError, StoreLockedError
from trinity_data.schema import STORED
from trinity_data.store.denormalize import KEYS, final_columns, num_final
from trinity_data.store.parquet import write_sealed
from trinity_data.store.retention import ExpiredRows, is_expired
from trinity_data.store.segment_reader import SegmentFiles, SegmentVanishedError
from trinity_data.store.segments import SEALED, SEGMENTS_FOLDER, Segment, check_content, record_segments
from trinity_data.store.tail import TailReader
from trinity_data.store.writer import Changes, Work

_log = logging.getLogger(__name__)

# a tail never waits for a merge that has not begun
_STOP, _SEAL, _MERGE, _END = range(4)
_Job = tuple[int, int, Segment | str | threading.Event]


class Maintenance:
    """One thread that seals tails in the order they were closed, and merges small files when no tail waits.

    The newest closed tail of experiences waits for the next one:
    by then it can be said what became of its rows.
    """

    def __init__(
        self,
        root: Path,
        submit: Callable[[Work], Future[None]],
        forget: Callable[[int], None],
        segments: Callable[[], list[Segment]],
        expired: Callable[[], list[ExpiredRows]],
        ended: Callable[[int, int], bool],
        *,
        epoch: int,
    ) -> None:
        self._root, self._submit, self._forget, self._epoch = root, submit, forget, epoch
        self._segments, self._expired, self._ended = segments, expired, ended
        self._jobs: queue.PriorityQueue[_Job] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._held: Segment | None = None
        self._left: frozenset[str] = frozenset()
        """Files that are not written again: damaged ones, and those that would not be better for it."""
        self._thread = threading.Thread(target=self._run, name="store-sealer", daemon=True)
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
                with _keeping_what_is_there(f"merge files of {subject!r}"):
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
            with _keeping_what_is_there(f"seal {segment.file}"):  # the tail is tried again at the next start
                self._seal(segment)
            self.merge(segment.table)

    def _seal(self, segment: Segment) -> None:
        rows = TailReader(self._root / segment.file).table(segment, STORED[segment.table])
        final = final_columns(self._root, rows) if segment.table == "experiences" else None
        sealed = write_sealed(self._root, segment, [rows], rows.schema, epoch=self._epoch, final=final)

        def swap(changes: Changes) -> None:
            swapped = changes.ledger.execute(
                "UPDATE segments SET kind = ?, file = ?, num_bytes = ?, checksum = ?, num_final = ? "
                "WHERE segment = ? AND kind = 'closed'",
                (SEALED, sealed.file, sealed.num_bytes, sealed.checksum, sealed.num_final, segment.number),
            )
            if swapped.rowcount != 1:
                raise StoreError(f"segment {segment.file} is not waiting to be sealed")

        self._submit(swap).result()
        self._forget(segment.number)
        os.unlink(self._root / segment.file)

    def _merge(self, table: str) -> None:
        while segments := self._due(table):
            try:
                final = self._final(segments)
                if final is not None and len(segments) == 1 and num_final(final) < final.num_rows:
                    self._left |= {segments[0].file}  # it would say no more than before
                    continue
                planned, parts = merge(self._root, segments)
                merged = write_sealed(
                    self._root, planned, parts, STORED[table], epoch=self._epoch, final=final
                )
            except StoreError:
                self._left |= {segment.file for segment in segments}  # reported once, and not tried again
                raise
            self._submit(partial(swap, segments=segments, merged=merged)).result()
            for segment in segments:
                os.unlink(self._root / segment.file)

    def _final(self, segments: Sequence[Segment]) -> pa.Table | None:
        if segments[0].table != "experiences":
            return None
        files = SegmentFiles(self._root)
        return final_columns(self._root, pa.concat_tables(files.whole(segment, KEYS) for segment in segments))

    def _due(self, table: str) -> list[Segment]:
        """What should be one file; rows that lost their contents stay apart from those that may lose them."""
        ranges = self._expired()
        found = [segment for segment in self._segments() if segment.table == table]
        for _, alike in itertools.groupby(found, lambda segment: is_expired(segment, ranges)):
            if segments := pick_for_compaction(list(alike), self._left):
                return segments
        return next(([segment] for segment in found if self._can_be_finished(segment)), [])

    def _can_be_finished(self, segment: Segment) -> bool:
        """Whether a file does not say yet what became of its rows, though all have ended.

        One that a branch shares may not.
        """
        if segment.kind != SEALED or segment.table != "experiences" or segment.file in self._left:
            return False
        if segment.num_final == segment.num_rows or not self._ended(segment.first_row, segment.end_row):
            return False
        path = self._root / segment.file
        return path.exists() and path.stat().st_nlink == 1


@contextmanager
def _keeping_what_is_there(what: str) -> Iterator[None]:
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


def pick_for_compaction(segments: Sequence[Segment], apart: frozenset[str] = frozenset()) -> list[Segment]:
    """The neighbours of a table that should be one file now, or none.

    `segments` are all of the table's, in order. A file is merged with those behind it when together they
    outweigh it, so that a row is written again at most once for each doubling, and a table has no more small
    files than `FEW` and the binary logarithm of `ENOUGH_BYTES`. Files that are named in `apart` stay as they
    are.
    """
    for run, ended in _runs(segments, apart):
        for number, first in enumerate(run):
            behind = sum(segment.num_bytes for segment in run[number + 1 :])
            outweighed = len(run) - number >= FEW and first.num_bytes <= behind
            enough = len(run) - number > 1 and first.num_bytes + behind >= ENOUGH_BYTES
            if outweighed or enough or (ended and len(run) > 1):
                return _enough(run[number:])
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


def _runs(segments: Sequence[Segment], apart: frozenset[str]) -> Iterator[tuple[list[Segment], bool]]:
    """Small sealed neighbours, and whether a file that will stay as it is follows them."""
    run: list[Segment] = []
    for segment in segments:
        if segment.kind == SEALED and segment.num_bytes < ENOUGH_BYTES and segment.file not in apart:
            run.append(segment)
        else:
            yield run, segment.kind == SEALED
            run = []
    yield run, False


def _enough(run: Sequence[Segment]) -> list[Segment]:
    taken: list[Segment] = []
    for segment in run:
        taken.append(segment)
        if len(taken) > 1 and sum(each.num_bytes for each in taken) >= ENOUGH_BYTES:
            break
    return taken
