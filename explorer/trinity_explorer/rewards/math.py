"""Rewards for answers that are numbers.

A reward compares numbers as numbers: `1,200`, `$1200` and `1200.0` are the same answer. Nothing of the text is evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import lru_cache

# a sign after a digit or a letter is a minus or a hyphen; a comma counts between groups of three digits only
_NUMBER = r"(?:(?<![\w.)])[-+](?=[$\d.]))?\$?\s?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)(?:\s*/\s*\d+)?"
_BRACES = r"\{[^{}]*\}"
_MARKED = (
    re.compile(rf"####\s*({_NUMBER})"),
    re.compile(rf"\\boxed\{{((?:[^{{}}]|{_BRACES})*)\}}"),
    re.compile(r"<answer>(.*?)</answer>", re.DOTALL),
    re.compile(rf"(?:^|\n)A:\s*({_NUMBER})"),
)
_BOXED_ONLY = (_MARKED[1],)
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_LATEX_SPACING = str.maketrans({"\\": None, "{": None, "}": None, "!": None, "−": "-"})


@dataclass(frozen=True)
class Reward:
    """The reward of one response, its parts by name, and the metrics that are not part of the sum."""

    total: float
    parts: Mapping[str, float]
    metrics: Mapping[str, float] = field(default_factory=dict)


RewardFunction = Callable[..., Reward]
"""Called as `reward(response_text, answer, **reward_fn_args)`."""


def parse_number(text: str) -> Fraction | None:
    """The last number in `text`, exactly, or None."""
    found = re.findall(_NUMBER, _LATEX_FRACTION.sub(r"\1/\2", text).translate(_LATEX_SPACING))
    if not found:
        return None
    digits = re.sub(r"[,$\s]", "", found[-1])
    top, _, bottom = digits.partition("/")
    try:
        value = Fraction(Decimal(top))
        return value / int(bottom) if bottom else value
    except (InvalidOperation, ZeroDivisionError, ValueError):  # ValueError: thousands of digits
        return None


@lru_cache(maxsize=1024)
def marked_answer(text: str, marks: tuple[re.Pattern[str], ...] = _MARKED) -> str | None:
    r"""What follows the last answer mark: `#### 7`, `\boxed{7}`, `<answer>7</answer>` or a line `A: 7`."""
    matches = [match for mark in marks for match in mark.finditer(text)]
    return max(matches, key=lambda match: match.start()).group(1) if matches else None


def is_correct(response: str, answer: str) -> bool:
    """Whether the response ends in the number of the reference answer; an unmarked last number counts too."""
    given = final_number(response)
    return given is not None and given == final_number(answer)


@lru_cache(maxsize=1024)
def final_number(text: str) -> Fraction | None:
    """The number that `text` marks as its answer, or its last one. A group asks for the same reference many times."""
    return parse_number(marked_answer(text) or text)


def accuracy_reward(response: str, answer: str) -> Reward:
    """1 for the right number, else 0."""
    accuracy = float(is_correct(response, answer))
    return Reward(accuracy, {"accuracy": accuracy}, {"accuracy": accuracy})


def format_reward(response: str, answer: str, *, weight: float = 0.1) -> Reward:
    """`weight` when the answer is marked, `-weight` when it is not."""
    marked = marked_answer(response) is not None
    return Reward(
        weight if marked else -weight, {"format": weight if marked else -weight}, {"format": float(marked)}
    )


def math_reward(response: str, answer: str, *, format_weight: float = 0.1) -> Reward:
    """Accuracy (0 or 1) plus the format reward."""
    return _sum(accuracy_reward(response, answer), format_reward(response, answer, weight=format_weight))


def math_boxed_reward(response: str, answer: str, *, with_think: bool = False) -> Reward:
    r"""1 when the last `\boxed{}` holds the right number; -0.1 when a `<think>` block is asked for and missing."""
    boxed = marked_answer(response, _BOXED_ONLY)
    accuracy = float(boxed is not None and is_correct(boxed, answer))
    penalty = -0.1 if with_think and "</think>" not in response else 0.0
    return Reward(accuracy + penalty, {"accuracy": accuracy, "format": penalty}, {"accuracy": accuracy})


def _sum(*rewards: Reward) -> Reward:
    parts = {name: value for reward in rewards for name, value in reward.parts.items()}
    metrics = {name: value for reward in rewards for name, value in reward.metrics.items()}
    return Reward(sum(reward.total for reward in rewards), parts, metrics)


REWARDS: dict[str, RewardFunction] = {
    "math_reward": math_reward,
    "accuracy_reward": accuracy_reward,
    "format_reward": format_reward,
    "math_boxed_reward": math_boxed_reward,
}
