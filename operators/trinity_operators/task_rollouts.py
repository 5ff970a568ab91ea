"""Operators that ask the run's own engines for rollouts of tasks, before the first step of their stage.

They run in the run's own process, on the whole task set, and with the weights that the stage begins with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trinity_data.dataset.task import Task
from trinity_data.errors import OperatorError
from trinity_operators.base import Operator


@dataclass(frozen=True)
class TriedTask:
    """What rollouts of a task came to."""

    rewards: tuple[float, ...]
    """Raw, of those that did not fail."""
    error: str = ""
    """Of the first that failed."""
    requests: int = 0
    """That were made for it now; none where the rollouts were on record. So are the next."""
    tokens: int = 0
    num_rollouts: int = 0


class TaskRollouts(Protocol):
    """Makes rollouts of a stage's tasks with its workflow and rewards, or takes those on record."""

    def attempt(
        self, tasks: Sequence[Task], *, num_rollouts: int, pass_above: float, runs: Sequence[Path]
    ) -> list[TriedTask]:
        """Of each task; waits for them, and first for the engines.

        A reward above `pass_above` is a pass. Of `runs` too, those of the same model asked in the same way
        are taken from the record.
        """
        ...


class RolloutOperator(Operator):
    """Shared by operators that ask for rollouts of tasks."""

    pure = False
    calls_model = True
    whole_set = True
    rollouts: TaskRollouts | None = None
    taskset: str = ""
    """The name of the set that the tasks are of."""

    def connect(self, rollouts: TaskRollouts, taskset: str) -> None:
        """Called before `prepare`, in a run."""
        self.rollouts, self.taskset = rollouts, taskset

    def prepare(self) -> None:
        if self.rollouts is None:
            raise OperatorError(f"{self.name!r} asks the engines, which only a run has")
