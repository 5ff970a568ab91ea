"""What becomes of an experience, and what is written together.

Every experience is in exactly one state, and only moves along `NEXT`;
`trained` is reached by forming a batch alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import pyarrow as pa

from trinity_data.errors import StoreError

MARKS = "store_clients"
"""What the keys of `progress` begin with that mark writes of other processes as done."""


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


@dataclass(frozen=True, kw_only=True)
class Commit:
    """One atomic write.

    Rows of `outcomes` settle their experiences by themselves; `states` is for exceptions.
    """

    tables: Mapping[str, pa.Table] = field(default_factory=dict)
    """By name in `schema.TABLES`; missing columns become null."""
    states: Sequence[tuple[str, State]] = ()
    """New states by experience id; for a row of this commit, its first state."""
    progress: Mapping[str, Any] = field(default_factory=dict)
    """Small JSON values that must be durable with the rows: stream positions, completed stages. None removes
    what the key has.
    """
    expected: Mapping[str, Any] = field(default_factory=dict)
    """Progress as it must still be, None for a key without a value; else nothing is written."""


@dataclass(frozen=True)
class Checkpoint:
    """A trainer checkpoint and the ledger position it stands for."""

    step: int
    path: str
    stage: str
    position: int


@dataclass(frozen=True)
class Place:
    """Of a participant in a run of several processes; goes with each of its writes."""

    name: str
    epoch: int

    @property
    def marks(self) -> str:
        """What the keys of the marks of its writes begin with; they go when it is given up."""
        return f"{MARKS}/{self.name}/{self.epoch}/"
