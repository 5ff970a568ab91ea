"""Which experiences have lost their contents to retention: ranges of row numbers, for good, in the ledger.

Their rows stay, with everything small; the columns in `CONTENTS` are null.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from trinity_data.store.ledger import EXPIRED_TABLE
from trinity_data.store.segments import Segment

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
    found = ledger.execute("SELECT first_row, num_rows, num_bytes, at FROM expired ORDER BY first_row")
    return [ExpiredRows(*row) for row in found.fetchall()]


def record(ledger: sqlite3.Connection, ranges: Sequence[ExpiredRows]) -> None:
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


def range_of(ledger: sqlite3.Connection, experience_id: str) -> ExpiredRows | None:
    """The range that an experience went with; None while it has its contents."""
    ranges = all_expired(ledger)
    found = ledger.execute("SELECT row FROM experiences WHERE experience_id = ?", (experience_id,)).fetchone()
    return next((r for r in ranges if found and r.first_row <= found[0] < r.end_row), None)


def without_contents(rows: pa.Table) -> pa.Table:
    """The same rows, with null where their contents were."""
    for name in CONTENTS:
        at = rows.schema.get_field_index(name)
        rows = rows.set_column(at, rows.schema.field(at), pa.nulls(rows.num_rows, rows.schema.field(at).type))
    return rows
