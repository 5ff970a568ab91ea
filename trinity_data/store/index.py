"""The ledger's index of experiences: where each one is, and in which state.

Tallies per stage, step and state move with every change, so that counting never reads the rows.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.errors import StoreError
from trinity_data.schema import Values, filled, rollout_of, values_of
from trinity_data.store.types import NEXT, State, recorded

REQUIRED = ("experience_id", "stage", "step", "position", "rollout", "turn")
_Tally = tuple[str, int, str]


@dataclass(frozen=True)
class _Entry:
    experience_id: str
    row: int
    stage: str
    step: int
    state: State
    settled: bool


def insert(
    connection: sqlite3.Connection,
    rows: pa.Table,
    first_row: int,
    states: Mapping[str, State],
    outcomes: pa.Table | None = None,
) -> pa.Table | None:
    """Indexes rows of `experiences`, with their outcomes where those come in the same commit.

    Returns the outcomes of other rows. Refuses an id that is there already.
    """
    for column in REQUIRED:
        if rows[column].null_count:
            raise StoreError(f"experiences.{column} is missing in {rows[column].null_count} rows")
    columns = [values_of(rows[column]) for column in REQUIRED]
    failed = [bool(error) for error in values_of(rows["error"])]
    new_outcomes = _new_outcomes(outcomes)
    first = [
        _first_entry(identifier, State.FAILED if error else State.RAW, states, new_outcomes)
        for identifier, error in zip(columns[0], failed, strict=True)
    ]
    numbers = range(first_row, first_row + rows.num_rows)
    try:
        connection.executemany(
            "INSERT INTO experiences (row, experience_id, stage, step, position, rollout, turn, "
            "state, settled, advantage, shaped_reward) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            ((*row, *entry) for row, entry in zip(zip(numbers, *columns, strict=True), first, strict=True)),
        )
    except sqlite3.IntegrityError as error:
        raise _duplicate(connection, columns[0], first_row) from error
    _tally(connection, Counter(zip(columns[1], columns[2], (entry[0] for entry in first), strict=True)))
    if outcomes is None or not new_outcomes:
        return None
    return outcomes.filter(pc.is_in(outcomes["experience_id"], pa.array(new_outcomes.keys(), pa.string())))


def _new_outcomes(outcomes: pa.Table | None) -> dict[str, tuple[bool, float | None, float | None]]:
    """Kept, advantage and shaped reward, by id."""
    if outcomes is None:
        return {}
    identifiers = values_of(outcomes["experience_id"])
    kept = values_of(filled(outcomes["kept"], True))
    numbers = zip(kept, values_of(outcomes["advantage"]), values_of(outcomes["reward"]), strict=True)
    by_id = dict(zip(identifiers, numbers, strict=True))
    if len(by_id) != len(identifiers):
        doubled = next(name for name, times in Counter(identifiers).items() if times > 1)
        raise StoreError(f"two outcomes for experience {doubled!r} in one commit")
    return by_id


def _first_entry(
    identifier: str,
    state: State,
    states: Mapping[str, State],
    new_outcomes: dict[str, tuple[bool, float | None, float | None]],
) -> tuple[State, int, float | None, float | None]:
    """State, settled, advantage and shaped reward of a new row; takes its outcome out of `new_outcomes`."""
    outcome = new_outcomes.pop(identifier, None)
    if outcome is None:
        return states.get(identifier, state), 0, None, None
    kept, advantage, shaped_reward = outcome
    settled = states.get(identifier) or _state_from_outcome(identifier, state, kept)
    return settled, 1, advantage, shaped_reward


def record_outcomes(connection: sqlite3.Connection, outcomes: pa.Table) -> None:
    """Writes what the pipeline decided of rows that are stored; each is settled once."""
    new_outcomes = _new_outcomes(outcomes)
    entries = list(_entries(connection, list(new_outcomes)))
    if settled := [entry.experience_id for entry in entries if entry.settled]:
        raise StoreError(f"experience {settled[0]!r} has an outcome already")
    states = [
        _state_from_outcome(entry.experience_id, entry.state, new_outcomes[entry.experience_id][0])
        for entry in entries
    ]
    connection.executemany(
        "UPDATE experiences SET settled = 1, advantage = ?, shaped_reward = ?, state = ? WHERE row = ?",
        (
            (*new_outcomes[entry.experience_id][1:], state, entry.row)
            for entry, state in zip(entries, states, strict=True)
        ),
    )
    _tally_state_changes(connection, entries, states)


def change_states(connection: sqlite3.Connection, states: Mapping[str, State]) -> None:
    """Changes states of rows that are stored already, along `state.NEXT` only."""
    entries = list(_entries(connection, list(states)))
    for entry in entries:
        new = states[entry.experience_id]
        if new not in NEXT[entry.state]:
            raise StoreError(f"experience {entry.experience_id!r} is {entry.state} and cannot become {new}")
    _set_states(connection, entries, [states[entry.experience_id] for entry in entries])


def form_batch(
    connection: sqlite3.Connection,
    stage: str,
    step: int,
    identifiers: Sequence[str],
    sequence: int,
    *,
    replay: bool,
) -> list[bool]:
    """Records a batch and takes its rows out of `pending`, in the order given;
    which of them were trained before.
    """
    entries = list(_entries(connection, identifiers))
    allowed = (State.PENDING, State.TRAINED) if replay else (State.PENDING,)
    for entry in entries:
        if entry.state not in allowed:
            raise StoreError(
                f"experience {entry.experience_id!r} is {entry.state}; "
                f"the batch of step {step} may take only {' and '.join(allowed)} ones"
            )
    if len({entry.row for entry in entries}) != len(entries):
        raise StoreError(f"the batch of step {step} names an experience twice")
    connection.execute("INSERT INTO batches VALUES (?, ?, ?, ?)", (step, stage, len(entries), sequence))
    connection.executemany(
        "INSERT INTO batch_rows VALUES (?, ?, ?)",
        ((step, position, entry.row) for position, entry in enumerate(entries)),
    )
    fresh = [entry for entry in entries if entry.state == State.PENDING]
    _set_states(connection, fresh, [State.TRAINED] * len(fresh))
    return [entry.state == State.TRAINED for entry in entries]


def batch(connection: sqlite3.Connection, step: int) -> list[str] | None:
    """The ids of a recorded batch in order."""
    if connection.execute("SELECT 1 FROM batches WHERE step = ?", (step,)).fetchone() is None:
        return None
    rows = connection.execute(
        "SELECT experience_id FROM batch_rows JOIN experiences USING (row) WHERE batch_rows.step = ? "
        "ORDER BY batch_rows.position",
        (step,),
    )
    return [row[0] for row in rows.fetchall()]


def in_state(
    connection: sqlite3.Connection,
    stage: str,
    state: State,
    *,
    through_step: int | None = None,
    limit: int | None = None,
) -> list[str]:
    """Ids in the order (step, position, rollout, turn). `raw` and `pending` have an index of their own."""
    rows = connection.execute(
        f"SELECT experience_id FROM experiences WHERE state = '{state}' AND stage = ? AND step <= ? "
        "ORDER BY step, position, rollout, turn, experience_id LIMIT ?",
        (stage, 2**62 if through_step is None else through_step, -1 if limit is None else limit),
    )
    return [row[0] for row in rows.fetchall()]


def num_in_state(
    connection: sqlite3.Connection, stage: str, state: State, *, through_step: int | None = None
) -> int:
    """How many there are, from the tallies."""
    number = connection.execute(
        "SELECT coalesce(sum(num_rows), 0) FROM tallies WHERE stage = ? AND step <= ? AND state = ?",
        (stage, 2**62 if through_step is None else through_step, state),
    )
    return int(number.fetchone()[0])


def num_rollouts_in_state(
    connection: sqlite3.Connection, stage: str, state: State, *, through_step: int | None = None
) -> int:
    """How many rollouts have a row in the state; their ids are those of their rows without the turn."""
    number = connection.execute(
        f"SELECT count(DISTINCT rtrim(experience_id, '0123456789')) FROM experiences WHERE state = '{state}' "
        "AND stage = ? AND step <= ?",
        (stage, 2**62 if through_step is None else through_step),
    )
    return int(number.fetchone()[0])


def of_step(connection: sqlite3.Connection, stage: str, step: int) -> list[tuple[str, State]]:
    """All experiences of a step with their states, in order."""
    rows = connection.execute(
        "SELECT experience_id, state FROM experiences WHERE stage = ? AND step = ? "
        "ORDER BY position, rollout, turn, experience_id",
        (stage, step),
    )
    return [(identifier, recorded(state)) for identifier, state in rows.fetchall()]


def num_rows_by_step(connection: sqlite3.Connection, stage: str) -> dict[int, tuple[int, int]]:
    """Of each step of a stage how many experiences it has, and how many of them did not fail."""
    rows = connection.execute(
        "SELECT step, sum(num_rows), sum(CASE WHEN state = 'failed' THEN 0 ELSE num_rows END) "
        "FROM tallies WHERE stage = ? GROUP BY step HAVING sum(num_rows) > 0 ORDER BY step",
        (stage,),
    )
    return {step: (all_rows, finished) for step, all_rows, finished in rows.fetchall()}


def have_ended(connection: sqlite3.Connection, first_row: int, end_row: int) -> bool:
    """Whether the states of these rows are their last, and no outcome can come any more."""
    open_rows = connection.execute(
        "SELECT 1 FROM experiences WHERE row >= ? AND row < ? AND "
        "(state IN ('raw', 'pending') OR (state = 'failed' AND NOT settled)) LIMIT 1",
        (first_row, end_row),
    )
    return open_rows.fetchone() is None


def counts(connection: sqlite3.Connection, stage: str | None) -> dict[State, int]:
    """How many experiences are in each state; every state is named."""
    totals = connection.execute(
        "SELECT state, sum(num_rows) FROM tallies WHERE ? IS NULL OR stage = ? GROUP BY state",
        (stage, stage),
    )
    return dict.fromkeys(State, 0) | {recorded(state): total for state, total in totals.fetchall()}


def locate(
    connection: sqlite3.Connection, identifiers: Sequence[str]
) -> tuple[npt.NDArray[np.int64], Values, Values]:
    """Row numbers, advantages and shaped rewards in the order asked; refuses an unknown id."""
    places = connection.execute(
        "SELECT e.row, e.advantage, e.shaped_reward FROM json_each(?) AS asked "
        "LEFT JOIN experiences AS e ON e.experience_id = asked.value ORDER BY asked.key",
        (json.dumps(identifiers),),
    ).fetchall()
    rows = [row for row, _, _ in places]
    if None in rows:
        raise _unknown(identifiers[rows.index(None)])
    advantages = pa.array([place[1] for place in places], pa.float64())
    return np.array(rows, np.int64), advantages, pa.array([place[2] for place in places], pa.float64())


def _entries(connection: sqlite3.Connection, identifiers: Sequence[str]) -> Iterator[_Entry]:
    entries = connection.execute(
        "SELECT asked.value, e.row, e.stage, e.step, e.state, e.settled FROM json_each(?) AS asked "
        "LEFT JOIN experiences AS e ON e.experience_id = asked.value ORDER BY asked.key",
        (json.dumps(identifiers),),
    )
    for identifier, row, stage, step, state, settled in entries.fetchall():
        if row is None:
            raise _unknown(identifier)
        yield _Entry(identifier, row, stage, step, recorded(state), bool(settled))


def _state_from_outcome(identifier: str, state: State, keep: bool) -> State:
    if state in (State.RAW, State.PENDING):
        return State.PENDING if keep else State.DROPPED
    if state == State.FAILED and not keep:
        return State.FAILED
    raise StoreError(
        f"experience {identifier!r} is {state}; its outcome cannot {'keep' if keep else 'drop'} it"
    )


def _set_states(connection: sqlite3.Connection, entries: Sequence[_Entry], new: Sequence[State]) -> None:
    connection.executemany(
        "UPDATE experiences SET state = ? WHERE row = ?",
        zip(new, [entry.row for entry in entries], strict=True),
    )
    _tally_state_changes(connection, entries, new)


def _tally_state_changes(
    connection: sqlite3.Connection, entries: Sequence[_Entry], new: Sequence[State]
) -> None:
    changes: Counter[_Tally] = Counter()
    for entry, state in zip(entries, new, strict=True):
        changes[entry.stage, entry.step, entry.state] -= 1
        changes[entry.stage, entry.step, state] += 1
    _tally(connection, changes)


def _tally(connection: sqlite3.Connection, changes: Mapping[_Tally, int]) -> None:
    connection.executemany(
        "INSERT INTO tallies VALUES (?, ?, ?, ?) "
        "ON CONFLICT (stage, step, state) DO UPDATE SET num_rows = num_rows + excluded.num_rows",
        ((*key, change) for key, change in changes.items() if change),
    )


def _duplicate(connection: sqlite3.Connection, identifiers: Iterable[str], first_row: int) -> StoreError:
    for identifier, times in Counter(identifiers).items():
        stored = connection.execute(
            "SELECT 1 FROM experiences WHERE experience_id = ? AND row < ?", (identifier, first_row)
        ).fetchone()
        if stored or times > 1:
            break
    where = "the store" if stored else "one commit twice"
    return StoreError(f"experience {identifier!r} is in {where} already; nothing of the commit was written")


def _unknown(identifier: str) -> StoreError:
    return StoreError(f"experience {identifier!r} is not in the store")


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
    newest: set[str] = set()
    oldest: tuple[int, int, int] | None = None
    for step, position, rollout, row in connection.execute(_NEWEST_USED, (stage, through_step)):
        newest.add(rollout_of(row))
        if len(newest) > num_used:
            break
        oldest = (step, position, rollout)
    used = [] if oldest is None else connection.execute(_USED, (stage, through_step, *oldest)).fetchall()
    return [Candidate(*row) for row in (*fresh, *used)]


TOKEN_ADVANTAGES = "token_advantages/"
"""Key of `progress`, followed by the stage; there once an outcome of it has advantages by token."""


def note_token_advantages(connection: sqlite3.Connection, stages: Collection[str]) -> None:
    """From now on `read` looks for them."""
    keys = [(f"{TOKEN_ADVANTAGES}{stage}",) for stage in stages]
    connection.executemany("INSERT OR IGNORE INTO progress VALUES (?, 'true')", keys)


def has_token_advantages(connection: sqlite3.Connection) -> bool:
    """Whether any outcome has them."""
    found = connection.execute(
        "SELECT 1 FROM progress WHERE key >= ? AND key < ? LIMIT 1", (TOKEN_ADVANTAGES, "token_advantages0")
    )
    return found.fetchone() is not None


def allow_replay(connection: sqlite3.Connection, stage: str) -> None:
    """From now on, and for a later audit of the run."""
    connection.execute("INSERT OR IGNORE INTO progress VALUES (?, 'true')", (f"{REPLAY}{stage}",))
