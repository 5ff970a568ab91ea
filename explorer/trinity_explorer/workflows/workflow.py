"""What a workflow is: one try of a task with the policy, and the reward it earned.

Ours asks one question and rewards the answer.
"""

from __future__ import annotations

from typing import Any, Protocol

from trinity_data.dataset.task import Task
from trinity_explorer.chat import ChatModel
from trinity_explorer.rewards.reward import BoundReward, Reward


class Workflow(Protocol):
    """Built once a process; `run` may be called many times at once, from several threads."""

    async def run(self, task: Task, model: ChatModel) -> Any:
        """Talks to the model and returns the reward; each reply of the model becomes an experience.

        With a parameter `auxiliary_models` it is given those of the stage by their names, as `model` is.
        """
        ...


class MathWorkflow:
    """Sends the task's messages as they are and rewards the reply."""

    def __init__(self, reward_fn: BoundReward) -> None:
        self.reward_fn = reward_fn

    async def run(self, task: Task, model: ChatModel) -> Reward:
        reply = await model.chat(task.messages)
        return await self.reward_fn(reply, task)
