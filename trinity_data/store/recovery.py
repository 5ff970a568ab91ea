"""Opening a store after anything may have happened: the files are made to agree with the ledger.

Only what the ledger does not name is cut or removed, and of files only those that are called
as a store's are; a file that lost bytes is set aside and named when it is read.
"""

from __future__ import annotations

import logging
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from trinity_data.schema import STORED
from trinity_data.store.segments import CLOSED, TAIL, Segment, all_segments, made_files
from trinity_data.store.tail import TailWriter

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recovered:
    """Where an earlier writer stopped."""

    tails: list[TailWriter]
    closed: list[Segment]
    next_rows: dict[str, int]
    next_number: int


def recover(root: Path, ledger: sqlite3.Connection) -> Recovered:
    """Cuts tails, removes orphans.

    Runs inside the transaction that took the epoch, so nobody else is writing.
    """
    segments = all_segments(ledger)
    next_rows = {segment.table: segment.end_row for segment in segments}
    tails = []
    for segment in (each for each in segments if each.kind == TAIL):
        if (tail := TailWriter.reopen(root, segment, STORED[segment.table])) is not None:
            tails.append(tail)
        else:
            ledger.execute("UPDATE segments SET kind = ? WHERE segment = ?", (CLOSED, segment.number))
    known_files = {segment.file for segment in segments}
    for orphan in (root / file for file in made_files(root) if file not in known_files):
        _log.info("removing %s, which the ledger does not know", orphan)
        orphan.unlink()
    return Recovered(
        tails=tails,
        closed=[segment for segment in all_segments(ledger) if segment.kind == CLOSED],
        next_rows=next_rows,
        next_number=max((segment.number for segment in segments), default=0) + 1,
    )
