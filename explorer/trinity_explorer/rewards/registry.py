"""Reward functions by name."""

from __future__ import annotations

from collections.abc import Callable

from trinity_explorer.rewards.code import code_reward
from trinity_explorer.rewards.math import accuracy_reward, format_reward, math_boxed_reward, math_reward
from trinity_explorer.rewards.reward import Reward

REWARDS: dict[str, Callable[..., Reward]] = {
    "accuracy_reward": accuracy_reward,
    "code_reward": code_reward,
    "format_reward": format_reward,
    "math_boxed_reward": math_boxed_reward,
    "math_reward": math_reward,
}

REWARD_NUMBERS: dict[str, frozenset[str]] = {
    "accuracy_reward": frozenset({"accuracy"}),
    "code_reward": frozenset({"accuracy", "isolated", "tests", "timed_out"}),
    "format_reward": frozenset({"format"}),
    "math_boxed_reward": frozenset({"accuracy", "format"}),
    "math_reward": frozenset({"accuracy", "format"}),
}
"""The parts and metrics that each of them gives."""

PURE_REWARDS = frozenset({"accuracy_reward", "format_reward", "math_boxed_reward", "math_reward"})
"""Those that may run in the run's own process: they neither wait nor run anything."""

CODE_REWARDS = frozenset({"code_reward"})
"""Those that run code that a model wrote."""
