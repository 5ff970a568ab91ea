"""What has become of an experience.

Every experience is in exactly one state, and only moves along `NEXT`; `trained` is reached by forming a batch alone.
"""

from __future__ import annotations

from enum import StrEnum


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
