"""What a workflow is: one try of a task with the policy, and the reward it earned."""

from __future__ import annotations

from typing import Any, Protocol

from trinity_data.dataset.task import Task
from trinity_explorer.reply import ChatModel


class Workflow(Protocol):
    """Built once a process; `run` may be called many times at once, from several threads."""

    async def run(self, task: Task, model: ChatModel) -> Any:
        """Talks to the model and returns the reward; each reply of the model becomes an experience."""
        ...
