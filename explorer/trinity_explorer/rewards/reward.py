"""What a rollout earned, and how what other people's functions return becomes it.

A reward is finite or there is none: whatever else is returned fails the rollout,
with the type and value that were found.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from trinity_data.errors import RolloutError

ALLOWED = (
    "allowed are a finite number, a dict of finite numbers by name (their sum is the reward), and a Reward"
)
MAX_SHOWN = 80


@dataclass(frozen=True)
class Reward:
    """The reward of one response, its parts by name, and the metrics that are not part of the sum."""

    total: float
    parts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


def as_reward(value: object, who: str) -> Reward:
    """What `who` returned, as a Reward of floats. Raises RolloutError with the type and value found."""
    if type(value) is Reward and type(value.parts) is type(value.metrics) is dict and _holds_floats(value):
        return value
    if isinstance(value, Reward):
        total = _finite(value.total, f"{who} returned a Reward whose total is")
        return Reward(total, _numbers(value.parts, who, "parts"), _numbers(value.metrics, who, "metrics"))
    if isinstance(value, Mapping):
        parts = _numbers(value, who, "parts")
        if not parts:
            raise RolloutError(f"{who} returned an empty dict; {ALLOWED}")
        return Reward(_finite(sum(parts.values()), f"{who} returned parts whose sum is"), parts)
    return Reward(_finite(value, f"{who} returned"))


def _holds_floats(reward: Reward) -> bool:
    """Whether nothing is to be done: so it is nearly always, and thousands of times a second."""
    total = reward.total
    if type(total) is not float:
        return False
    for named in (reward.parts, reward.metrics):
        for name, value in named.items():
            if type(name) is not str or type(value) is not float:
                return False
            # one that is not finite makes the sum so
            total += value
    return math.isfinite(total)


def shown(value: object) -> str:
    """The value and its type for a message, cut short, whatever its `repr` does."""
    try:
        text = repr(value)
    except Exception:  # the boundary to a repr of other people's
        text = "a value that cannot be shown"
    cut = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
    return f"{cut} ({type(value).__name__})"


def _finite(value: object, said: str) -> float:
    number = _number(value)
    if number is None or not math.isfinite(number):
        raise RolloutError(f"{said} {shown(value)}; {ALLOWED}")
    return number


def _number(value: Any) -> float | None:
    """A Python or numpy number, or an array or tensor without dimensions, as a float; None for all else."""
    if type(value) is float:
        return value
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        value = value.item()
    if not isinstance(value, numbers.Real | Decimal):
        return None
    try:
        return float(value)
    except (OverflowError, ValueError):  # an integer beyond float64; Decimal('sNaN')
        return math.inf


def _numbers(values: object, who: str, what: str) -> Mapping[str, float]:
    if not values and isinstance(values, Mapping):
        return {}
    if not isinstance(values, Mapping):
        raise RolloutError(
            f"{who} returned {what} that are {shown(values)}; a dict of numbers by name is allowed"
        )
    for name in values:
        if not isinstance(name, str):
            raise RolloutError(f"{who} returned {what} with the name {shown(name)}; names are text")
    return {name: _finite(value, f"{who} returned {what} with {name!r} as") for name, value in values.items()}
