"""What a stage is made from, beside its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trinity_data.config import ExperienceBufferConfig, StageConfig, TasksetConfig
from trinity_data.dataset.reader import DatasetSpec


@dataclass(frozen=True)
class ModelFiles:
    """A model as it lies on disk."""

    path: str
    tokenizer: Any


@dataclass(frozen=True)
class StageInputs:
    """The model and the data of a run as they lie on disk, and its seed."""

    model_path: str
    tokenizer: Any
    seed: int
    base_dir: Path
    """The folder of the pipeline file."""
    source_of: Callable[[TasksetConfig | ExperienceBufferConfig], DatasetSpec]
    """Where the rows of a task set or of training data are read from."""
    run_folder: Path = Path()
    eval_tasksets: Sequence[Mapping[str, Any]] = ()
    """The evaluation sets of all stages, with paths that exist, as their configuration in plain values."""
    auxiliary_models: Mapping[str, ModelFiles] = field(default_factory=dict)
    """By the `model_path` of the pipeline file."""


def num_steps(stage: StageConfig) -> int | None:
    """Of the whole stage, where the file counts in steps."""
    return stage.trainer.total_steps or stage.buffer.total_steps
