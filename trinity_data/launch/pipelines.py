"""The operators of a stage, in their order.

Nothing heavy is imported, so that a stored run passes through another pipeline quickly.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trinity_data.config import StageConfig
from trinity_data.config.algorithm_registry import algorithm_named
from trinity_operators.base import Operator
from trinity_operators.registry import build_advantage, build_operators


def experience_operators(stage: StageConfig, base_dir: Path) -> list[Operator]:
    """The stage's experience pipeline with the algorithm's advantage. Raises before anything starts."""
    _, chain = configured_and_chain(stage, base_dir)
    return chain


def configured_and_chain(stage: StageConfig, base_dir: Path) -> tuple[list[Operator], list[Operator]]:
    """The operators as the file lists them, and the chain that they are part of."""
    operators = build_operators(stage.data_processor.experience_pipeline.operators, base_dir)
    return operators, in_order(operators, advantage_operators(stage))


def in_order(operators: Sequence[Operator], advantage: Sequence[Operator]) -> list[Operator]:
    """The operators, then the advantage, then the operators that go behind it.

    An operator that writes advantages itself takes the place of the algorithm's.
    """
    before = [operator for operator in operators if not operator.after_advantage]
    behind = [operator for operator in operators if operator.after_advantage]
    has_own = any("advantage" in operator.writes for operator in before)
    return [*before, *([] if has_own else advantage), *behind]


def advantage_operators(stage: StageConfig) -> list[Operator]:
    """The operator that `algorithm.advantage_fn` names, if the algorithm takes advantages."""
    name = stage.algorithm.advantage_fn or algorithm_named(stage.algorithm.algorithm_type).advantage_fn
    if name is None:
        return []
    return [build_advantage(name, stage.algorithm.advantage_fn_args)]
