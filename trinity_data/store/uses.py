"""How often rows were trained: one row of the ledger's `batch_rows` is one use.

Only a stage that asked for replay may use a row again; the ledger remembers which those are.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

REPLAY = "replay/"
"""Key of `progress`, followed by the stage; there once the stage may train a row more than once."""

_FRESH = (
    "SELECT experience_id, step, 0, NULL FROM experiences WHERE state = 'pending' AND stage = ? AND step <= ? "
    "ORDER BY step, position, rollout, turn, experience_id"
)
_USED = (
    "SELECT e.experience_id, e.step, count(*), max(b.step) FROM ("
    "SELECT * FROM experiences WHERE state = 'trained' AND stage = ? AND step <= ? "
    "ORDER BY step DESC, position DESC, rollout DESC, turn DESC, experience_id DESC LIMIT ?"
    ") e JOIN batch_rows b USING (row) GROUP BY e.row ORDER BY e.step, e.position, e.rollout, e.turn, e.experience_id"
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A row that the next batch may take."""

    experience_id: str
    step: int
    """The one it was made for."""
    uses: int
    last_step: int | None
    """The step that trained it last."""


def candidates(
    connection: sqlite3.Connection, stage: str, *, through_step: int, num_used: int
) -> list[Candidate]:
    """Rows that wait, then the newest `num_used` of those that were trained; both oldest first."""
    fresh = connection.execute(_FRESH, (stage, through_step)).fetchall()
    used = connection.execute(_USED, (stage, through_step, num_used)).fetchall() if num_used else []
    return [Candidate(*row) for row in (*fresh, *used)]


def allow_replay(connection: sqlite3.Connection, stage: str) -> None:
    """From now on, and for whoever audits the run later."""
    connection.execute("INSERT OR IGNORE INTO progress VALUES (?, 'true')", (f"{REPLAY}{stage}",))
