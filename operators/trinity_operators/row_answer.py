"""What an operator of one row says, where a plain value does not say it all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
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


def total_of(
    answers: Sequence[RowAnswer | None], added: Mapping[str, float] | None = None
) -> dict[str, float]:
    """The sums of what the answers count, and of what was added without one."""
    totals = dict(added or {})
    for answer in answers:
        _add(totals, answer.totals if answer is not None else {})
    return totals


_TOTALS: ContextVar[dict[str, float] | None] = ContextVar("totals of the call", default=None)


def add_totals(**numbers: float) -> None:
    """Adds to the totals of the call that an `async` operator is in, whatever becomes of its row.

    For what was spent before it is known if the row has an answer. Outside of such a call it does nothing.
    """
    totals = _TOTALS.get()
    if totals is not None:
        _add(totals, numbers)


@contextmanager
def added_totals() -> Iterator[dict[str, float]]:
    """What `add_totals` adds up to within, in tasks that are started there too."""
    totals: dict[str, float] = {}
    token = _TOTALS.set(totals)
    try:
        yield totals
    finally:
        _TOTALS.reset(token)


def _add(totals: dict[str, float], numbers: Mapping[str, float]) -> None:
    for name, number in numbers.items():
        totals[name] = totals.get(name, 0.0) + number
