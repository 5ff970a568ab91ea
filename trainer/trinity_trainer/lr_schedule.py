"""The learning rate by step: warm-up, then constant or a cosine down to a floor."""

from __future__ import annotations

import math

from trinity_data.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, num_steps: int | None) -> float:
    """The rate of update `step`, counted from 0; the first update of a warm-up is not at rate 0.

    `num_steps` is None where a stage ends with its tasks;
    its file may then ask for neither a ratio nor a cosine.
    """
    warmup = warmup_steps(config, num_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.lr_scheduler_type == "constant":
        return config.lr
    assert num_steps is not None, "a cosine has an end"
    progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    floor = config.lr * config.min_lr_ratio
    return floor + (config.lr - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def warmup_steps(config: OptimizerConfig, num_steps: int | None) -> int:
    """`lr_warmup_steps` where it is set, else the ratio of the stage's steps."""
    if config.lr_warmup_steps >= 0:
        return config.lr_warmup_steps
    if not config.lr_warmup_steps_ratio:
        return 0
    assert num_steps is not None, "a share of the steps needs their number"
    return int(config.lr_warmup_steps_ratio * num_steps)
