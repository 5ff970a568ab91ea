"""How often rows were trained: one row of the ledger's `batch_rows` is one use.

Only a stage that asked for replay may use a row again; the ledger remembers which those are.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from trinity_data.schema import rollout_of

REPLAY = "replay/"
"""Key of `progress`, followed by the stage; there once the stage may train a row more than once."""

_FRESH = (
    "SELECT experience_id, step, 0, "
    "NULL FROM experiences WHERE state = 'pending' AND stage = ? AND step <= ? ORDER BY step, position, "
    "rollout, turn, experience_id"
)
_NEWEST_USED = (
    "SELECT step, position, rollout, "
    "experience_id FROM experiences WHERE state = 'trained' AND stage = ? AND step <= ? ORDER BY step DESC, "
    "position DESC, rollout DESC"
)
_USED = (
    "SELECT e.experience_id, e.step, count(*), max(b.step) FROM experiences e JOIN batch_rows b USING (row) "
    "WHERE e.state = 'trained' AND e.stage = ? AND e.step <= ? AND (e.step, e.position, e.rollout) >= (?, ?, "
    "?) GROUP BY e.row ORDER BY e.step, e.position, e.rollout, e.turn, e.experience_id"
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
    """Rows that wait, then those of the newest `num_used` rollouts that were trained; both oldest first.

    Rollouts of several explorers with the same step, position and number come together,
    so that there may be more.
    """
    fresh = connection.execute(_FRESH, (stage, through_step)).fetchall()
    oldest = _oldest_used(connection, stage, through_step, num_used)
    used = [] if oldest is None else connection.execute(_USED, (stage, through_step, *oldest)).fetchall()
    return [Candidate(*row) for row in (*fresh, *used)]


def _oldest_used(
    connection: sqlite3.Connection, stage: str, through_step: int, num_used: int
) -> tuple[int, int, int] | None:
    """Step, position and number of the last of the newest `num_used` rollouts that were trained."""
    seen: set[str] = set()
    oldest: tuple[int, int, int] | None = None
    for *place, row in connection.execute(_NEWEST_USED, (stage, through_step)):
        seen.add(rollout_of(row))
        if len(seen) > num_used:
            break
        oldest = (place[0], place[1], place[2])
    return oldest


def allow_replay(connection: sqlite3.Connection, stage: str) -> None:
    """From now on, and for whoever audits the run later."""
    connection.execute("INSERT OR IGNORE INTO progress VALUES (?, 'true')", (f"{REPLAY}{stage}",))
