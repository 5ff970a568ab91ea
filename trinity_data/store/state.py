"""What has become of an experience.

Every experience is in exactly one state, and only moves along `NEXT`;
`trained` is reached by forming a batch alone.
"""

from __future__ import annotations

from enum import StrEnum

from trinity_data.errors import StoreError


class State(StrEnum):
    RAW = "raw"
    """The rollout finished; its pipeline has not run yet."""
    PENDING = "pending"
    """Kept, and waiting for a batch."""
    TRAINED = "trained"
    DROPPED = "dropped"
    STALE = "stale"
    FAILED = "failed"


NEXT: dict[State, frozenset[State]] = {
    State.RAW: frozenset({State.PENDING, State.DROPPED, State.STALE, State.FAILED}),
    State.PENDING: frozenset({State.DROPPED, State.STALE, State.FAILED}),
    State.TRAINED: frozenset(),
    State.DROPPED: frozenset(),
    State.STALE: frozenset(),
    State.FAILED: frozenset(),
}


def recorded(name: object) -> State:
    """A state as the ledger has it."""
    try:
        return State(str(name))
    except ValueError:
        raise StoreError(
            f"the ledger is damaged: it names {name!r} as a state; `trinity-data audit` says what else is"
        ) from None
