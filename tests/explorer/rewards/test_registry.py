"""The parts and metrics that the built-in rewards are said to give are those that they give."""

from __future__ import annotations

import pytest

from trinity_data.dataset.task import Task
from trinity_explorer.rewards.registry import PURE_REWARDS, REWARD_NUMBERS, REWARDS


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_a_built_in_reward_gives_the_numbers_that_it_declares(name: str) -> None:
    if name in PURE_REWARDS:
        reward = REWARDS[name]("It is 7.\n#### 7", "7")
    else:
        task = Task.from_prompt("Add.", test="assert True")
        reward = REWARDS[name]("```python\nx = 1\n```", "", task=task)
    assert {*reward.parts, *reward.metrics} == REWARD_NUMBERS[name]
