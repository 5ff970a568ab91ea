"""Scores, metrics and reward parts that operators look up by name, held against what the chain offers.

Columns are checked with `reads`. These names are values inside a column, or scores that an operator writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from trinity_data.config import StageConfig
from trinity_data.errors import did_you_mean
from trinity_data.launch.workflows import reward_numbers
from trinity_data.schema import EXPERIENCES
from trinity_operators.base import Operator


@dataclass(frozen=True)
class UnknownScore:
    """A name that no operator before writes, and no reward that is known gives."""

    position: int
    """Of the operator in the chain."""
    text: str
    may_be_there: bool
    """Where the names are not all known before the run."""


def unknown_scores(stage: StageConfig, operators: Sequence[Operator]) -> Iterator[UnknownScore]:
    """Of a chain of experience operators."""
    numbers = reward_numbers(stage)
    own_operators = stage.data_processor.task_pipeline.operators
    # an operator may write the column that names the reward function
    is_known = numbers is not None and not any(":" in each.name for each in own_operators)
    columns = {
        field.name
        for field in EXPERIENCES
        if pa.types.is_floating(field.type) or pa.types.is_integer(field.type)
    }
    offered = columns | (numbers or set())
    for position, operator in enumerate(operators):
        for name in operator.looks_up:
            if name not in offered:
                yield UnknownScore(position, _in_words(operator, name, offered - columns), not is_known)
        offered |= {*operator.writes}
        is_known = is_known and not operator.writes_more


def _in_words(operator: Operator, name: str, offered: set[str]) -> str:
    known = ", ".join(sorted(offered)) or "none"
    return (
        f"{operator.label!r} looks up {name!r}, which is no score of an operator before it and no known "
        f"metric or reward part; known: {known}{did_you_mean(name, offered)}"
    )
