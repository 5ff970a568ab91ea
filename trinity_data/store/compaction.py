"""Small sealed files become few large ones, so that a store has a bounded number
of files however it was written.

The rows keep their numbers. The merged file is durable before the ledger names it in place of the others, and
those go only after that; a crash in between leaves files that the ledger does not name, which the next
opening removes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from trinity_data.errors import StoreError
from trinity_data.store.file_names import SEGMENTS_FOLDER
from trinity_data.store.segment_reader import SegmentFiles
from trinity_data.store.segments import SEALED, Segment, check_content, record_segments
from trinity_data.store.writer import Changes

# a file of this size is left alone; two smaller ones make at most twice of it
ENOUGH_BYTES = 16 << 20
FEW = 8


def due(segments: Sequence[Segment], apart: frozenset[str] = frozenset()) -> list[Segment]:
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
