"""Task operators that ask the engines of their stage, for rollouts or as language models, and the engines as
such operators see them.

The chain runs in the process that has the engines, and waits for them; a stage gives them its first weights
before its first step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trinity_data.config import ExplorerConfig, TasksetConfig
from trinity_data.dataset.task import Task
from trinity_data.errors import OperatorError
from trinity_operators.base import Operator
from trinity_operators.endpoint import ROLLOUT_MODEL, LanguageModel


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


class TaskEngines(Protocol):
    """The engines of a stage. Asked from the threads of task operators, which wait until they are open."""

    @property
    def model_names(self) -> Collection[str]:
        """Of `models`."""
        ...

    def models(self) -> Mapping[str, LanguageModel]:
        """The rollout model and the auxiliary ones, by name."""
        ...

    def attempt(
        self, tasks: Sequence[Task], *, num_rollouts: int, pass_above: float, runs: Sequence[Path] | None
    ) -> list[TriedTask]:
        """What rollouts of each task with the stage's workflow and rewards come to: made now, or on record.

        A reward above `pass_above` is a pass. Those of the same model asked in the same way are taken from
        the record of the engines' own run and of `runs`: where None, of the other runs of its project.
        """
        ...

    def described(self, taskset: str) -> Mapping[str, Any]:
        """What the answers about a task set depend on besides its rows, for a manifest."""
        ...


class RolloutOperator(Operator):
    """Shared by operators that ask for rollouts of tasks."""

    pure = False
    calls_model = True
    # all tasks at once keep the engines full to the end
    whole_set = True
    engines: TaskEngines | None = None
    taskset: TasksetConfig | None = None
    """The set that the tasks are of."""

    def connect(self, engines: TaskEngines, taskset: TasksetConfig) -> None:
        """Called before `prepare`, where there are engines."""
        self.engines, self.taskset = engines, taskset

    def prepare(self) -> None:
        if self.engines is None:
            raise OperatorError(f"{self.name!r} asks the engines of a stage, which are not here")


def stage_models(explorer: ExplorerConfig) -> tuple[str, ...]:
    """The names of the models that operators of a stage may ask."""
    return (ROLLOUT_MODEL, *(model.name for model in explorer.auxiliary_models))


def asks_engines(operator: Operator, models: Collection[str]) -> bool:
    """Whether it asks the engines of its stage, whose models have these names."""
    return isinstance(operator, RolloutOperator) or operator.asks_model_of(models)


def first_asking(operators: Sequence[Operator], models: Collection[str]) -> str | None:
    """The label of an operator that asks the engines of its stage; None where none does."""
    return next((each.label for each in operators if asks_engines(each, models)), None)


def connect_engines(
    operators: Sequence[Operator], engines: TaskEngines | None, taskset: TasksetConfig
) -> None:
    """Gives the operators that ask engines those of their stage; called before the chain is prepared."""
    if engines is None:
        return
    for operator in operators:
        if isinstance(operator, RolloutOperator):
            operator.connect(engines, taskset)
        elif operator.asks_model_of(engines.model_names):
            operator.connect_models(engines.models())
