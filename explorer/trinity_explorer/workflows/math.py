"""One question, one answer, one number to compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trinity_data.pipeline.task import Task
from trinity_explorer.model import Model
from trinity_explorer.rewards.math import Reward


class MathWorkflow:
    """Sends the task's messages as they are and rewards the text that comes back."""

    def __init__(self, reward_fn: Callable[..., Reward], workflow_args: Mapping[str, Any]) -> None:
        if workflow_args:
            raise TypeError(f"math_workflow takes no workflow_args, got {sorted(workflow_args)}")
        self.reward_fn = reward_fn

    async def run(self, task: Task, model: Model) -> Reward:
        reply = await model.chat(task.messages)
        return self.reward_fn(reply.text, task.answer)
