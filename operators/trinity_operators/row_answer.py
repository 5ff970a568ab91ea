"""What an operator of one row says, where a plain value does not say it all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RowAnswer:
    """The value for one row, with its reason and what it cost."""

    value: Any
    """Of a mapper a dict of the columns, or the value of the only one; of a filter if it keeps the row."""
    reason: str = ""
    """For `decisions`: of a filter why it drops the row, of a mapper what it says of the value."""
    totals: Mapping[str, float] = field(default_factory=dict)
    """Numbers that add up over the rows of a step, such as `requests` and `tokens`."""


def as_answer(returned: Any) -> RowAnswer:
    """What a function returned for a row; a plain value is an answer without more to say."""
    return returned if isinstance(returned, RowAnswer) else RowAnswer(returned)


def total_of(answers: Sequence[RowAnswer | None]) -> dict[str, float]:
    """The sums of what the answers count."""
    totals: dict[str, float] = {}
    for answer in answers:
        for name, number in answer.totals.items() if answer is not None else ():
            totals[name] = totals.get(name, 0.0) + number
    return totals
