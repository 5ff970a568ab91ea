"""What is written together: rows of several tables, changes of state and progress, all of it or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from trinity_data.store.state import State


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
    """Small JSON values that must be durable with the rows: stream positions, completed stages."""


@dataclass(frozen=True)
class Checkpoint:
    """A trainer checkpoint and the ledger position it stands for."""

    step: int
    path: str
    stage: str
    position: int
