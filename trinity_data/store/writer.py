"""The one thread that writes: whatever waits goes to disk together, in the order it was submitted.

Rows are appended and synced inside the ledger's transaction, under its write lock;
the ledger's commit makes them real.
"""

from __future__ import annotations

import json
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from trinity_data.errors import StoreError, TrinityError
from trinity_data.store.ledger import check_epoch
from trinity_data.store.segments import SEGMENT_COLUMNS, Segment
from trinity_data.store.tail import Tails, Written

_MAX_JOBS = 512
_MAX_BYTES = 16 << 20
# a file system ends several syncs at once, on a busy disk in a quarter of the time that they take one by one
_MAX_SYNCS = 4


@dataclass
class Changes:
    """What one job wants written: ledger changes are made at once, rows are collected."""

    ledger: sqlite3.Connection
    sequence: int
    first_rows: dict[str, int]
    """The number that the next row of each table gets."""
    rows: dict[str, list[pa.Table]] = field(default_factory=dict)
    close_tails: bool = False
    """Ends every tail after this commit, so that all rows so far are sealed."""

    def append(self, name: str, rows: pa.Table) -> int:
        """Adds rows in the stored schema; returns the number of the first."""
        first = self.first_rows.get(name, 0)
        if rows.num_rows:
            self.rows.setdefault(name, []).append(rows)
            self.first_rows[name] = first + rows.num_rows
        return first


Work = Callable[[Changes], None]


@dataclass(frozen=True)
class _Job:
    work: Work
    rows: Mapping[str, pa.Table]
    future: Future[None]


class Writer:
    """Runs submitted work, several jobs in one durable transaction.

    A job that is refused leaves nothing behind.
    """

    def __init__(
        self,
        root: Path,
        ledger: sqlite3.Connection,
        tails: Tails,
        *,
        epoch: int,
        next_rows: dict[str, int],
        on_closed: Callable[[list[Segment]], None],
    ) -> None:
        self._root, self._ledger, self._tails, self._epoch = root, ledger, tails, epoch
        self._next_rows = next_rows
        self._on_closed = on_closed
        self._broken: StoreError | None = None
        self._closed = False
        self._submitting = threading.Lock()
        self._disk = ThreadPoolExecutor(_MAX_SYNCS, "store-disk")
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    def submit(self, work: Work, rows: Mapping[str, pa.Table] | None = None) -> Future[None]:
        """Queues work; the future is done when it is durable, or says why it was refused.

        `rows` are those that the work will append before any other:
        they go to disk while it changes the ledger.
        """
        job = _Job(work, rows or {}, Future())
        with self._submitting:
            if self._closed:
                raise StoreError(f"the store {self._root} is closed")
            self._jobs.put(job)
        return job.future

    def close(self) -> None:
        """Writes what was submitted, then ends the thread and lets go of the tails."""
        with self._submitting:
            if self._closed:
                return
            self._closed = True
            self._jobs.put(None)
        self._thread.join()
        self._disk.shutdown()
        self._tails.close()

    def _run(self) -> None:
        ended = False
        while not ended:
            jobs, ended = self._take()
            running = [job for job in jobs if job.future.set_running_or_notify_cancel()]
            if running:
                self._write(running)

    def _take(self) -> tuple[list[_Job], bool]:
        """What waits, up to a size at which one more row would only make the others wait."""
        jobs: list[_Job] = []
        num_bytes = 0
        while len(jobs) < _MAX_JOBS and num_bytes < _MAX_BYTES:
            try:
                job = self._jobs.get(block=not jobs)
            except queue.Empty:
                break
            if job is None:
                return jobs, True
            jobs.append(job)
            num_bytes += sum(table.get_total_buffer_size() for table in job.rows.values())
        return jobs, False

    def _write(self, jobs: list[_Job]) -> None:
        try:
            if self._broken is not None:
                raise self._broken
            refused = self._transact(jobs)
        except Exception as error:  # the boundary of the writer thread: a waiting caller gets the reason
            failure = error
            if not isinstance(error, TrinityError):
                failure = StoreError(
                    f"cannot write to {self._root}: {error}; nothing of this commit is stored"
                )
                failure.__cause__ = error
            for job in jobs:
                job.future.set_exception(failure)
            return
        for number, job in enumerate(jobs):
            if number in refused:
                job.future.set_exception(refused[number])
            else:
                job.future.set_result(None)

    def _transact(self, jobs: list[_Job]) -> dict[int, Exception]:
        self._ledger.execute("BEGIN IMMEDIATE")
        ahead = _Ahead(self._tails, self._next_rows, self._disk)
        try:
            check_epoch(self._ledger, self._epoch)
            ahead.start(jobs)
            changes, refused = self._collect(jobs)
            segments, confirm = self._tails.place(ahead.finish(changes.rows), close_all=changes.close_tails)
            record_segments(self._ledger, segments)
            self._ledger.execute("UPDATE writer SET sequence = ?", (changes.sequence,))
        except BaseException:
            ahead.abandon()
            if self._ledger.in_transaction:
                self._ledger.execute("ROLLBACK")
            raise
        try:
            self._ledger.execute("COMMIT")
        except sqlite3.Error as error:
            # it may still be on disk: only opening the store again can tell
            self._broken = StoreError(
                f"the ledger of {self._root} could not commit: {error}; nothing more is written, "
                "open the store again"
            )
            raise self._broken from error
        self._next_rows = changes.first_rows
        closed = confirm()
        if closed:
            self._on_closed(closed)
        return refused

    def _collect(self, jobs: list[_Job]) -> tuple[Changes, dict[int, Exception]]:
        """Runs each job in a savepoint of its own, so that one that is refused does
        not take others with it.
        """
        sequence = self._ledger.execute("SELECT sequence FROM writer").fetchone()[0]
        changes = Changes(self._ledger, sequence, dict(self._next_rows))
        refused: dict[int, Exception] = {}
        for number, job in enumerate(jobs):
            part = Changes(self._ledger, changes.sequence + 1, dict(changes.first_rows))
            self._ledger.execute("SAVEPOINT job")
            try:
                job.work(part)
            except Exception as error:  # the boundary of a job: its caller gets what it raised
                self._ledger.execute("ROLLBACK TO job")
                refused[number] = error
            else:
                changes.sequence, changes.first_rows = part.sequence, part.first_rows
                changes.close_tails |= part.close_tails
                for name, tables in part.rows.items():
                    changes.rows.setdefault(name, []).extend(tables)
            self._ledger.execute("RELEASE job")
        return changes, refused


class _Ahead:
    """Rows on their way to disk while the ledger is changed.

    Those of a job that is refused are written over.
    """

    def __init__(self, tails: Tails, first_rows: dict[str, int], disk: Executor) -> None:
        self._tails, self._first_rows, self._disk = tails, first_rows, disk
        self._parts: dict[str, list[pa.Table]] = {}
        self._written: dict[str, Written] = {}
        self._synced: list[Future[None]] = []

    def start(self, jobs: list[_Job]) -> None:
        for job in jobs:
            for name, table in job.rows.items():
                if table.num_rows:
                    self._parts.setdefault(name, []).append(table)
        if self._parts:
            self._written = self._write(self._parts)
            self._synced = [self._disk.submit(each.writer.sync) for each in self._written.values()]

    def finish(self, rows: dict[str, list[pa.Table]]) -> dict[str, Written]:
        """All of `rows` on disk: what is not as it was expected is written now."""
        # by identity: comparing the rows would read them
        tables = {name: [id(part) for part in parts] for name, parts in rows.items()}
        expected = {
            name: each
            for name, each in self._written.items()
            if [id(part) for part in self._parts[name]] == tables.get(name)
        }
        late = self._write({name: parts for name, parts in rows.items() if name not in expected})
        for each in late.values():
            each.writer.sync()
        for synced in self._synced:
            synced.result()
        return expected | late

    def abandon(self) -> None:
        """Returns when nothing is synced any more."""
        wait(self._synced)

    def _write(self, rows: Mapping[str, list[pa.Table]]) -> dict[str, Written]:
        return self._tails.write(
            {name: pa.concat_tables(parts) for name, parts in rows.items()}, self._first_rows
        )


def record_segments(ledger: sqlite3.Connection, segments: Iterable[Segment]) -> None:
    """Names new segments, and how far known ones have grown."""
    ledger.executemany(
        f"INSERT INTO segments ({SEGMENT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (segment) DO UPDATE SET "
        "kind = excluded.kind, num_rows = excluded.num_rows, num_bytes = excluded.num_bytes, "
        "checksum = excluded.checksum",
        (
            (s.number, s.table, s.kind, s.file, s.first_row, s.num_rows, s.num_bytes, s.checksum, s.num_final)
            for s in segments
        ),
    )


def record_snapshot(changes: Changes) -> None:
    """Names this version by the length of every table, so that it can be read again later."""
    lengths = {name: rows for name, rows in changes.first_rows.items() if rows}
    changes.ledger.execute(
        "INSERT INTO snapshots VALUES (?, ?)", (changes.sequence, json.dumps(lengths, sort_keys=True))
    )
