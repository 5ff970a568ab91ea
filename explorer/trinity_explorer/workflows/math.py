"""One question, one answer, one number to compare."""

from __future__ import annotations

from trinity_data.dataset.task import Task
from trinity_explorer.reply import ChatModel
from trinity_explorer.rewards.bind import BoundReward
from trinity_explorer.rewards.reward import Reward


class MathWorkflow:
    """Sends the task's messages as they are and rewards the reply."""

    def __init__(self, reward_fn: BoundReward) -> None:
        self.reward_fn = reward_fn

    async def run(self, task: Task, model: ChatModel) -> Reward:
        reply = await model.chat(task.messages)
        return await self.reward_fn(reply, task)
