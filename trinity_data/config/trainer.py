"""The section `trainer`: micro-batches, checkpoints and processes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trinity_data.config.base import Section, derived


class TrainerConfig(Section):
    name: str = Field(default="trainer", min_length=1)
    """A label for the reader of the file; nothing is named after it."""
    trainer_type: Literal["fsdp"] = "fsdp"
    """PyTorch FSDP2. `verl` is the documents' spelling of the same."""
    save_interval: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0 saves at a stage's end."""
    total_steps: int | None = derived(None, "`buffer.total_steps`", ge=1)
    """The same as `buffer.total_steps`."""
    grad_clip: float = derived(0.0, "`algorithm.optimizer.clip_grad`", gt=0)
    """Norm the gradient is clipped to."""
    use_dynamic_bsz: bool = True
    """Make micro-batches by tokens (`max_token_len_per_gpu`); false: by rows (`micro_batch_size_per_gpu`)."""
    max_token_len_per_gpu: int = derived(0, "2 × `model.max_model_len`", ge=1)
    """Most tokens of a micro-batch, padding included (`use_dynamic_bsz: true`)."""
    micro_batch_size_per_gpu: int | None = Field(default=None, ge=1)
    """Most rows of a micro-batch (`use_dynamic_bsz: false`)."""
    shared_prompts: bool = True
    """Run a prompt once for all rows of the batch that begin with it,
    where that saves time (`use_dynamic_bsz: true`).
    """
    max_skipped_updates: int = Field(default=3, ge=1)
    """Updates in a row that may be skipped because their gradient is not finite; then the run stops."""
    ulysses_sequence_parallel_size: Literal[1] = 1
    """GPUs that share one sequence."""
    world_size: int = derived(0, "the GPUs that the engines leave, or 1 without GPUs", ge=1)
    """Trainer processes."""
    save_hf_checkpoint: Literal["last", "always", "never"] = "always"
    """Which checkpoints also hold a Hugging Face folder."""
    max_checkpoints_to_keep: int = Field(default=0, ge=0)
    """Checkpoints that stay on disk; 0 is all."""
    stop_timeout: float = Field(default=60, ge=0)
    """Seconds that Ctrl-C leaves for the step under way and a checkpoint of it."""
