"""Engines of a stage whose rollouts came to something that the test says."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trinity_data.dataset.task import Task
from trinity_operators.endpoint import LanguageModel
from trinity_operators.task_engines import TriedTask


@dataclass
class ScriptedEngines:
    """Remembers what was asked."""

    tried: Sequence[TriedTask] = ()
    """Of the tasks in their order; else of each task by its prompt."""
    by_prompt: Mapping[str, TriedTask] = field(default_factory=dict)
    model: str = "scripted"
    asked: list[Task] = field(default_factory=list)
    runs: Sequence[Path] | None = ()
    by_name: Mapping[str, LanguageModel] = field(default_factory=dict)

    @property
    def model_names(self) -> Collection[str]:
        return self.by_name.keys()

    def models(self) -> Mapping[str, LanguageModel]:
        return self.by_name

    def attempt(
        self, tasks: Sequence[Task], *, num_rollouts: int, pass_above: float, runs: Sequence[Path] | None
    ) -> list[TriedTask]:
        self.asked += tasks
        self.runs = runs
        return list(self.tried) or [self.by_prompt[task.prompt] for task in tasks]

    def described(self, taskset: str) -> dict[str, Any]:
        return {"model": self.model, "taskset": taskset}
