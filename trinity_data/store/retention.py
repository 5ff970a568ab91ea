"""Takes the contents of experiences that nobody needs any more off the disk.

The rows themselves and their states stay, and the columns in `CONTENTS` are null; the ledger holds the
ranges of row numbers, for good. A file goes whole or not at all: one without the contents is durable
before the ledger names it in its place, in one transaction that looks again whether the rows may go. That
needs no epoch, so a run may go on beside it.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.errors import StoreError, unknown_name
from trinity_data.schema import STORED
from trinity_data.store.denormalize import KEYS, final_columns
from trinity_data.store.ledger import EXPIRED_TABLE, naming_errors, open_for_writing, transaction
from trinity_data.store.parquet import write_sealed
from trinity_data.store.segment_reader import SegmentFiles, retry_if_moved
from trinity_data.store.segments import (
    SEALED,
    Segment,
    all_segments,
    check_checkpoint,
    check_content,
    check_size,
    replace_segment,
    segments_of,
)
from trinity_data.store.tags import tags
from trinity_data.store.types import NEXT

CONTENTS = (
    "token_ids", "logprobs", "action_mask", "kept_tokens", "banned_tokens", "messages", "images",
    "response_text", "token_rewards", "tools",
)  # fmt: skip


@dataclass(frozen=True)
class ExpiredRows:
    """Neighbouring experiences whose contents went together."""

    first_row: int
    num_rows: int
    num_bytes: int
    """That their file became smaller by."""
    at: str
    """When, in UTC."""

    @property
    def end_row(self) -> int:
        return self.first_row + self.num_rows


def all_expired(ledger: sqlite3.Connection) -> list[ExpiredRows]:
    """Every range, in order."""
    if not ledger.execute("SELECT 1 FROM sqlite_master WHERE name = 'expired'").fetchone():
        return []
    ranges = ledger.execute("SELECT first_row, num_rows, num_bytes, at FROM expired ORDER BY first_row")
    return [ExpiredRows(*row) for row in ranges.fetchall()]


def record_expired(ledger: sqlite3.Connection, ranges: Sequence[ExpiredRows]) -> None:
    """Adds ranges, inside a transaction."""
    if not ranges:
        return
    ledger.execute(EXPIRED_TABLE)
    ledger.executemany(
        "INSERT INTO expired VALUES (?, ?, ?, ?)",
        [(r.first_row, r.num_rows, r.num_bytes, r.at) for r in ranges],
    )


def is_expired(segment: Segment, ranges: Sequence[ExpiredRows]) -> bool:
    """Whether all rows of a segment have lost their contents."""
    if segment.table != "experiences":
        return False
    lost = (min(r.end_row, segment.end_row) - max(r.first_row, segment.first_row) for r in ranges)
    return sum(max(0, rows) for rows in lost) == segment.num_rows


def expired_range_of(ledger: sqlite3.Connection, experience_id: str) -> ExpiredRows | None:
    """The range that an experience went with; None while it has its contents."""
    ranges = all_expired(ledger)
    row = ledger.execute("SELECT row FROM experiences WHERE experience_id = ?", (experience_id,)).fetchone()
    return next((r for r in ranges if row and r.first_row <= row[0] < r.end_row), None)


def refuse_expired(
    ledger: sqlite3.Connection,
    experience_ids: Sequence[str],
    rows: npt.NDArray[np.int64],
    columns: Sequence[str] | None,
) -> None:
    """Who asks for contents gets them, never null in their place."""
    contents = set(CONTENTS if columns is None else columns).intersection(CONTENTS)
    for lost in all_expired(ledger) if contents else ():
        places = np.flatnonzero((rows >= lost.first_row) & (rows < lost.end_row))
        if len(places):
            raise StoreError(
                f"experience {experience_ids[places[0]]!r} has no {', '.join(sorted(contents))} any more: "
                f"its contents were expired at {lost.at} (`trinity-data retain`)"
            )


def without_contents(rows: pa.Table) -> pa.Table:
    """The same rows, with null where their contents were."""
    for name in CONTENTS:
        at = rows.schema.get_field_index(name)
        rows = rows.set_column(at, rows.schema.field(at), pa.nulls(rows.num_rows, rows.schema.field(at).type))
    return rows


_FINAL = ", ".join(f"'{state}'" for state, following in NEXT.items() if not following)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What may stay.

    A file goes when all its rows are too old, or while the store is too large, oldest first.
    """

    older_than: timedelta | None = None
    max_bytes: int | None = None
    keep_tags: Sequence[str] | None = None
    """The tags whose rows stay; None for all of them."""


@dataclass(frozen=True)
class Kept:
    """A file whose contents stay, and why."""

    file: str
    num_bytes: int
    why: str


@dataclass(frozen=True)
class Retention:
    """What went, or would go, and what is left."""

    num_rows: int
    num_files: int
    freed_bytes: int
    left_bytes: int
    """Of all tables together."""
    kept: list[Kept]


def retain(root: Path, limits: Limits, *, now: datetime | None = None, dry_run: bool = False) -> Retention:
    """Expires what is beyond the limits.

    With `dry_run` nothing is written, and bytes are what the files have now.
    """
    if limits.older_than is None and limits.max_bytes is None:
        raise StoreError("nothing says what may go: give an age, a size, or both")
    now = now or datetime.now(UTC)
    keep = _tagged_rows(root, limits.keep_tags)
    with closing(open_for_writing(root)) as ledger:
        with naming_errors(root), transaction(ledger, "DEFERRED"):
            num_bytes = sum(segment.num_bytes for segment in all_segments(ledger))
            reasons = [(s, _needed(ledger, root, s, keep)) for s in segments_of(ledger, "experiences")]
        left_bytes, gone, kept = num_bytes, list[Segment](), list[Kept]()
        for segment, needed in reasons:
            why = needed or _within(root, segment, limits, left_bytes, now)
            if why is not None:
                kept.append(Kept(segment.file, segment.num_bytes, why))
                continue
            left_bytes -= segment.num_bytes if dry_run else _expire(root, ledger, segment, keep, now)
            gone.append(segment)
    num_rows = sum(segment.num_rows for segment in gone)
    return Retention(num_rows, len(gone), num_bytes - left_bytes, left_bytes, kept)


def _needed(ledger: sqlite3.Connection, root: Path, segment: Segment, keep: dict[str, int]) -> str | None:
    """Why the contents must stay whatever the limits, or None."""
    rows = (segment.first_row, segment.end_row)
    if segment.kind != SEALED:
        return "is not sealed yet"
    if is_expired(segment, all_expired(ledger)):
        return "was expired before"
    if tag := next((name for name, end in keep.items() if segment.first_row < end), None):
        return f"is shown by tag {tag!r}"
    waiting = f"SELECT 1 FROM experiences WHERE row >= ? AND row < ? AND state NOT IN ({_FINAL})"
    if ledger.execute(waiting, rows).fetchone():
        return "has rows that wait for their operators or a batch"
    checkpoints = ledger.execute("SELECT step, path FROM checkpoints ORDER BY step DESC").fetchall()
    newest = next((step for step, path in checkpoints if (root.parent / check_checkpoint(path)).is_dir()), 0)
    replayed = "SELECT 1 FROM batch_rows WHERE row >= ? AND row < ? AND step > ?"
    if ledger.execute(replayed, (*rows, newest)).fetchone():
        return "has rows of batches after the newest checkpoint, which a resume trains again"
    return None


def _within(root: Path, segment: Segment, limits: Limits, num_bytes: int, now: datetime) -> str | None:
    """Why the limits let a file stay, or None when it is beyond them."""
    if limits.max_bytes is not None and num_bytes > limits.max_bytes:
        return None
    if limits.older_than is None:
        return "fits into the size"
    times = retry_if_moved(lambda: SegmentFiles(root).whole(segment, ["started_at"]))["started_at"]
    if times.null_count:
        return "has rows that do not say when they were made"
    return None if pc.max(times).as_py() < now - limits.older_than else "is not old enough"


def _expire(
    root: Path, ledger: sqlite3.Connection, segment: Segment, keep: dict[str, int], now: datetime
) -> int:
    """Takes the contents out of one file; returns by how many bytes it became smaller."""
    check_content(root, segment)
    parts = (without_contents(part) for part in SegmentFiles(root).parts(segment))
    planned = replace(segment, file=str(Path(segment.file).with_suffix(".expired")))
    # the process' number makes the name one that nobody else writes
    final = final_columns(root, SegmentFiles(root).whole(segment, KEYS))
    smaller = write_sealed(root, planned, parts, STORED[segment.table], epoch=os.getpid(), final=final)
    freed = segment.num_bytes - smaller.num_bytes
    try:
        with naming_errors(root), transaction(ledger):
            _check_unchanged(ledger, root, segment, smaller, keep)
            replace_segment(ledger, segment, smaller)
            at = now.astimezone(UTC).isoformat(timespec="seconds")
            record_expired(ledger, [ExpiredRows(segment.first_row, segment.num_rows, freed, at)])
    except _ChangedError:
        (root / smaller.file).unlink(missing_ok=True)
        raise
    os.unlink(root / segment.file)
    return freed


class _ChangedError(StoreError):
    """The run went on in a way that matters."""


def _check_unchanged(
    ledger: sqlite3.Connection, root: Path, segment: Segment, smaller: Segment, keep: dict[str, int]
) -> None:
    """Under the ledger's write lock: a merge, or a start of the run that removed the new file,
    may have come between.
    """
    try:
        check_size(root, smaller)
    except StoreError:
        named = False
    else:
        named = segment in segments_of(ledger, segment.table)
    if not named or (why := _needed(ledger, root, segment, keep)):
        reason = "it was merged, or the run was started" if not named else f"it {why}"
        raise _ChangedError(f"{segment.file} changed while it was expired: {reason}; try again")


def _tagged_rows(root: Path, names: Sequence[str] | None) -> dict[str, int]:
    """How many experiences each tag that counts shows."""
    versions = tags(root)
    for name in names or ():
        if name not in versions:
            raise StoreError(f"{unknown_name('tag', name, versions)}; nothing was expired")
    return {
        name: versions[name].num_rows.get("experiences", 0) for name in (versions if names is None else names)
    }
