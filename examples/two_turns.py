"""A workflow of two turns and the reward of its last answer.

`trinity-data run examples/two_turns.yaml` uses them.
"""

from __future__ import annotations

import re

from trinity_data import ChatModel, Reward, Task, Workflow


class AnswerAndCheck(Workflow):
    """Asks, then asks the model to check its answer. Each turn is an experience with the rollout's reward."""

    def __init__(self, reward_fn, *, question: str = "Check your answer and give the number again.") -> None:
        self.reward_fn = reward_fn
        self.question = question

    async def run(self, task: Task, model: ChatModel) -> Reward:
        messages = [dict(message) for message in task.messages]
        first = await model.chat(messages)
        messages += [
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": self.question},
        ]
        last = await model.chat(messages, temperature=0.7)
        return await self.reward_fn(last, task)


def closeness(text: str, answer: str, *, scale: float = 10.0) -> Reward:
    """1 for the right number, less by the distance in units of `scale`, at least 0."""
    numbers = re.findall(r"-?\d+", text)
    distance = abs(int(numbers[-1]) - int(answer)) if numbers else scale
    near = max(0.0, 1.0 - distance / scale)
    return Reward(near, parts={"closeness": near}, metrics={"accuracy": float(distance == 0)})
