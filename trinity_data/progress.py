"""The keys under which a run keeps how far it has come, and the values that are more than a step's number.

They are small JSON values, durable in one transaction with the rows that they speak of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

EXPLORED, STAGE_DONE, TASKS, SYNC = "explored", "stage_done", "tasks", "sync"
EVALUATED, LATE, SERVED, CLAIMS, LEASE = "evaluated", "late", "served", "claims", "lease"
"""What a key begins with, before the first slash."""
ALL_EXPLORED = "all_explored"
"""A name for `sync_key`: of the last step, once no step beyond it will be explored."""


def explored_key(stage: str) -> str:
    """Of the last step that was explored to its end."""
    return f"{EXPLORED}/{stage}"


def claims_key(stage: str) -> str:
    """Of `Claims`, where explorers are processes of their own."""
    return f"{CLAIMS}/{stage}"


def lease_key(stage: str, work: str) -> str:
    """Of the place of the explorer that does what one of them does at a time."""
    return f"{LEASE}/{stage}/{work}"


def late_key(stage: str, explorer: str) -> str:
    """Of the ids of groups that were not whole when their step ended, as of the last one."""
    return f"{LATE}/{stage}/{explorer}"


def stage_done_key(stage: str) -> str:
    """Of the last step of a stage that has ended; there is none when the stage was reopened."""
    return f"{STAGE_DONE}/{stage}"


def sync_key(stage: str, name: str = "") -> str:
    """Of what explorer and trainer tell each other; without a name, what all these keys begin with."""
    return f"{SYNC}/{stage}/{name}"


def tasks_key(stage: str, taskset: str) -> str:
    """Of a `TasksProgress`."""
    return f"{TASKS}/{stage}/{taskset}"


def served_key(stage: str, explorer: str, kind: str, name: str = "") -> str:
    """Of a session of an agent outside, or of a reply in one; without a name, what those of the kind begin
    with.
    """
    return f"{SERVED}/{stage}/{explorer}/{kind}/{name}"


def evaluated_key(step: int) -> str:
    """Of the weights that mode `bench` evaluates, written before it begins: `digest` and `path`."""
    return f"{EVALUATED}/{step}"


@dataclass(frozen=True)
class TasksProgress:
    """How much of a task set its stage has read."""

    rows_read: int = 0
    exhausted: bool = False

    @classmethod
    def load(cls, value: Mapping[str, Any] | None) -> TasksProgress:
        """Of a stored value; without one nothing was read."""
        return cls(**(value or {}))

    def dump(self) -> dict[str, Any]:
        return asdict(self)
