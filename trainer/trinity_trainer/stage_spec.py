"""What a stage asks of the workers, step by step. Imports no torch, so that the driver can use it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from trinity_data.config import AlgorithmConfig, StageConfig, TasksetConfig, TrainerConfig
from trinity_data.dataset.reader import Source
from trinity_data.probe import TokenSequences, probe_sequences
from trinity_data.stage_inputs import StageInputs, num_steps


@dataclass(frozen=True)
class StageSpec:
    """What a stage asks of a worker."""

    algorithm: AlgorithmConfig
    trainer: TrainerConfig
    num_steps: int | None
    max_response_tokens: int
    """What a response may have; the constant of `loss_agg_mode: seq-mean-token-sum-norm`."""
    reference_checkpoint: str | None = None
    """The checkpoint that the stage begins with, whose weights the reference has; None:
    those of the model's folder.
    """


class ConfigurationHistory(Protocol):
    """Under which configuration each step of a run was trained."""

    @property
    def current(self) -> str:
        """The id of the configuration in force."""
        ...

    def stage_at(self, stage: str, step: int) -> StageConfig | None:
        """A stage as it was when `step` was trained; None when that was under the current one, or never."""
        ...


class StageSpecs:
    """What a stage asks of the workers at each of its steps.

    A step that is trained again is trained as it was, whatever the pipeline file has become since.
    """

    def __init__(
        self,
        stage: StageConfig,
        inputs: StageInputs,
        history: ConfigurationHistory,
        *,
        first_step: int,
        job_dir: Path,
        num_units: int = 0,
    ) -> None:
        """`num_units` is how many rollouts the training data of a stage holds that only trains."""
        self.stage, self.inputs, self.history, self.num_units = stage, inputs, history, num_units
        start = job_dir / f"global_step_{first_step - 1}"
        self.reference_checkpoint = str(start) if first_step > 1 else None
        self.current = self._spec_of(stage)
        self.probe: TokenSequences = ()
        """What engines that load the weights are compared with the trainer on."""
        if stage.is_live and stage.explorer.rollout_model.engine_type != "fake":
            self.probe = probe_sequences(inputs.tokenizer, max_model_len=stage.model.max_model_len)

    def at(self, step: int) -> StageSpec:
        stage = self.history.stage_at(self.stage.stage_name, step)
        return self.current if stage is None else self._spec_of(stage)

    def _spec_of(self, stage: StageConfig) -> StageSpec:
        return StageSpec(
            stage.algorithm,
            stage.trainer,
            self._num_steps(stage),
            stage.model.max_response_tokens,
            reference_checkpoint=self.reference_checkpoint,
        )

    def _num_steps(self, stage: StageConfig) -> int | None:
        """All steps of a configuration of this stage.

        None where it counts by tasks and no schedule asks for them.
        """
        buffer, optimizer = stage.buffer, stage.algorithm.optimizer
        if (configured := num_steps(stage)) is not None:
            return configured
        if self.stage.trains_stored:
            return max(1, self.num_units * buffer.total_epochs // buffer.train_batch_size)
        if optimizer.lr_scheduler_type == "constant" and not optimizer.lr_warmup_steps_ratio:
            return None
        tasks = sum(
            num_rows * (taskset.epochs or buffer.total_epochs)
            for taskset, num_rows in zip(self._tasksets, self._nums_of_rows, strict=True)
        )
        return math.ceil(tasks / buffer.batch_size)

    @property
    def _tasksets(self) -> list[TasksetConfig]:
        return [taskset for _, taskset in self.stage.buffer.explorer_input.train_tasksets()]

    @cached_property
    def _nums_of_rows(self) -> list[int]:
        return [Source(self.inputs.source_of(taskset)).num_rows for taskset in self._tasksets]
