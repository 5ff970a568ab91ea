"""The loss of an algorithm, with changes of single keys of the section `algorithm`."""

from __future__ import annotations

from typing import Any

from trinity_data.config import AlgorithmConfig
from trinity_trainer.algorithms.loss import LossFunction, build_loss


def loss_of(algorithm_type: str, **changes: Any) -> LossFunction:
    """Unlike a pipeline file, `changes` may be of any kind: the loss refuses what it cannot be itself."""
    return build_loss(AlgorithmConfig.model_construct(algorithm_type=algorithm_type, **changes))
