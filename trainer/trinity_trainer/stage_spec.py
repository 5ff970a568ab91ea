"""What goes to the ranks and comes back. Light to import, so that who only calls the ranks needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from trinity_data.config import AlgorithmConfig, TrainerConfig


@dataclass(frozen=True)
class StageSpec:
    """What a stage asks of a rank."""

    algorithm: AlgorithmConfig
    trainer: TrainerConfig
    num_steps: int | None
    max_response_tokens: int
    """What a response may have; the constant of `loss_agg_mode: seq-mean-token-sum-norm`."""
    reference_checkpoint: str | None = None
    """The checkpoint that the stage begins with, whose weights the reference has; None:
    those of the model's folder.
    """


@dataclass(frozen=True)
class StepResult:
    """What one optimiser step did: metrics of the whole batch, and per row of this rank what the loss saw."""

    metrics: dict[str, float]
    rows: list[int]
    importance_weights: list[float]
    clipped: list[float]
    loss_shares: list[float]
    logprobs: list[np.ndarray[Any, np.dtype[np.float32]]]
    ref_logprobs: list[np.ndarray[Any, np.dtype[np.float32]]] | None
    """None where the loss has no reference."""
