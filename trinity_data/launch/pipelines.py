"""The operators of a stage, in their order.

Nothing heavy is imported, so that a stored run can be judged again quickly.
"""

from __future__ import annotations

from pathlib import Path

from trinity_data.config import ExperiencePipelineConfig, StageConfig, TaskPipelineConfig
from trinity_operators.advantages import build_advantage
from trinity_operators.base import Operator
from trinity_operators.registry import OperatorSpec, build_operators
from trinity_trainer.algorithms.registry import algorithm_named


def experience_operators(stage: StageConfig, base_dir: Path) -> list[Operator]:
    """The stage's experience pipeline, with the algorithm's advantage at its end.

    Raises before anything starts.
    """
    operators = build_operators(_specs(stage.data_processor.experience_pipeline, base_dir))
    return [*operators, *advantage_operators(stage)]


def advantage_operators(stage: StageConfig) -> list[Operator]:
    """The operator that `algorithm.advantage_fn` names, if the algorithm takes advantages."""
    name = stage.algorithm.advantage_fn or algorithm_named(stage.algorithm.algorithm_type).advantage_fn
    if name is None or name == "none":
        return []
    return [build_advantage(name, stage.algorithm.advantage_fn_args)]


def task_operator_specs(stage: StageConfig, base_dir: Path) -> list[OperatorSpec]:
    return _specs(stage.data_processor.task_pipeline, base_dir)


def _specs(pipeline: TaskPipelineConfig | ExperiencePipelineConfig, base_dir: Path) -> list[OperatorSpec]:
    return [OperatorSpec(operator.name, operator.args, base_dir) for operator in pipeline.operators]
