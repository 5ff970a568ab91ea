"""What a workflow is: one try of a task with the policy, and the reward it earned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from trinity_data.pipeline.task import Task
from trinity_explorer.model import Model
from trinity_explorer.rewards.math import Reward


class Workflow(Protocol):
    """Built once a stage; `run` may be called many times at once."""

    async def run(self, task: Task, model: Model) -> Reward:
        """Talks to the model and returns the reward; each reply of the model becomes an experience."""
        ...


WorkflowFactory = Callable[[Callable[..., Reward], Mapping[str, Any]], Workflow]
"""Called with the reward function, its arguments bound, and `workflow_args`."""
