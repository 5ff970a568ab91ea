"""Where the batches of a stage come from, chosen by its configuration."""

from __future__ import annotations

from typing import Protocol

from trinity_data.config import ExperienceBufferConfig, StageConfig
from trinity_data.dataset.reader import Source
from trinity_data.stage_inputs import StageInputs
from trinity_data.store.store import Store
from trinity_data.synchronizer import Synchronizer
from trinity_trainer.datasets import build_dataset
from trinity_trainer.offline_sampler import OfflineDataset, OfflineSampler
from trinity_trainer.sampling.explored import ExploredSampler
from trinity_trainer.sampling.mixed import MixedSampler
from trinity_trainer.sampling.selection import FifoSelection, PrioritySelection, Selection


class BatchSampler(Protocol):
    """Where the experiences of a step come from."""

    async def next(self, step: int) -> list[str] | None:
        """Ids for `step` in training order.

        An empty list when operators dropped them all, None at the end.
        """
        ...


def build_sampler(
    stage: StageConfig, inputs: StageInputs, store: Store, synchronizer: Synchronizer
) -> BatchSampler:
    """Rows of a data set where the stage only trains, else those of the explorer,
    with a share of rows from an auxiliary buffer where `sample_strategy` is `mix`.
    """
    buffer, strategy = stage.buffer, stage.algorithm.sample_strategy_args
    experience_buffer = buffer.trainer_input.experience_buffer
    if stage.mode != "both":
        return OfflineSampler(
            store,
            _dataset(experience_buffer, "experience_buffer", stage, inputs, store),
            stage=stage.stage_name,
            first_step=synchronizer.first_step,
            batch_size=buffer.train_batch_size,
            seed=inputs.seed,
        )
    mixes = stage.algorithm.sample_strategy == "mix"
    num_experts = strategy.num_experts(buffer.train_batch_size) if mixes else 0
    auxiliary = buffer.trainer_input.auxiliary_buffers.get(strategy.sft_dataset_name)
    selection: Selection = FifoSelection(store, stage.stage_name, whole_groups=experience_buffer.whole_groups)
    if experience_buffer.replay_buffer.enable:
        selection = PrioritySelection(
            store,
            stage.stage_name,
            experience_buffer,
            max_staleness=strategy.staleness_limit,
            seed=inputs.seed,
            auxiliary="" if auxiliary is None else auxiliary.name,
        )
    explored = ExploredSampler(
        store,
        synchronizer,
        selection,
        stage=stage.stage_name,
        train_batch_size=buffer.train_batch_size - num_experts,
        max_read_timeout=experience_buffer.max_read_timeout,
        max_staleness=strategy.staleness_limit,
        whole_groups=experience_buffer.whole_groups,
    )
    if not mixes:
        return explored
    auxiliary = buffer.trainer_input.auxiliary_buffers[strategy.sft_dataset_name]
    return MixedSampler(
        explored,
        _dataset(auxiliary, f"auxiliary_buffers.{strategy.sft_dataset_name}", stage, inputs, store),
        name=auxiliary.name,
        num_experts=num_experts,
        expert_advantage=strategy.expert_advantage,
        first_step=synchronizer.first_step,
        seed=inputs.seed,
        replay=replays(stage),
    )


def replays(stage: StageConfig) -> bool:
    """Whether a row may be trained more than once."""
    return stage.buffer.trainer_input.experience_buffer.replay_buffer.reuse_cooldown_time is not None


def _dataset(
    buffer: ExperienceBufferConfig, key: str, stage: StageConfig, inputs: StageInputs, store: Store
) -> OfflineDataset:
    """`key` is the buffer's, below `trainer_input`."""
    needs_no_source = buffer.storage_type == "store" or buffer.holds_copied_rows
    return build_dataset(
        buffer,
        None if needs_no_source else Source(inputs.source_of(buffer)),
        inputs.tokenizer,
        stage.model,
        key=f"buffer.trainer_input.{key}",
        folder=store.root.parent / "buffer",
    )
