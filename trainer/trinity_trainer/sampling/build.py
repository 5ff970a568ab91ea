"""The batch sampler of a stage, chosen by its configuration."""

from __future__ import annotations

from trinity_data.config import ExperienceBufferConfig, StageConfig
from trinity_data.dataset.reader import Source
from trinity_data.stage_inputs import StageInputs
from trinity_data.store.protocol import WritableStore
from trinity_data.synchronizer import Synchronizer
from trinity_trainer.datasets import build_dataset
from trinity_trainer.offline_sampler import OfflineDataset, OfflineSampler
from trinity_trainer.sampling.mixed import MixedSampler
from trinity_trainer.sampling.priority import PrioritySelection
from trinity_trainer.sampling.sampler import BatchSampler, ExploredSampler, FifoSelection, Selection


def build_sampler(
    stage: StageConfig, inputs: StageInputs, store: WritableStore, synchronizer: Synchronizer
) -> BatchSampler:
    """Rows of a data set where the stage only trains, else those of the explorer,
    with a share of rows from an auxiliary buffer where `sample_strategy` is `mix`.
    """
    buffer, strategy = stage.buffer, stage.algorithm.sample_strategy_args
    batch_size, first_step = buffer.train_batch_size, synchronizer.first_step
    if stage.trains_stored:
        return OfflineSampler(
            store,
            _dataset(buffer.trainer_input.experience_buffer, "experience_buffer", stage, inputs, store),
            stage=stage.stage_name,
            first_step=first_step,
            batch_size=batch_size,
            seed=inputs.seed,
        )
    if stage.algorithm.sample_strategy != "mix":
        return _explored_sampler(stage, store, synchronizer, train_batch_size=batch_size, seed=inputs.seed)
    num_experts, name = strategy.num_experts(batch_size), strategy.sft_dataset_name
    auxiliary = buffer.trainer_input.auxiliary_buffers[name]
    return MixedSampler(
        _explored_sampler(
            stage, store, synchronizer, train_batch_size=batch_size - num_experts, seed=inputs.seed
        ),
        _dataset(auxiliary, f"auxiliary_buffers.{name}", stage, inputs, store),
        name=auxiliary.name,
        num_experts=num_experts,
        expert_advantage=strategy.expert_advantage,
        first_step=first_step,
        seed=inputs.seed,
        replay=replays(stage),
    )


def replays(stage: StageConfig) -> bool:
    """Whether a row may be trained more than once."""
    return stage.buffer.trainer_input.experience_buffer.replay_buffer.reuse_cooldown_time is not None


def _explored_sampler(
    stage: StageConfig, store: WritableStore, synchronizer: Synchronizer, *, train_batch_size: int, seed: int
) -> ExploredSampler:
    strategy, trainer_input = stage.algorithm.sample_strategy_args, stage.buffer.trainer_input
    buffer = trainer_input.experience_buffer
    selection: Selection = FifoSelection(store, stage.stage_name, whole_groups=buffer.whole_groups)
    if buffer.replay_buffer.enable:
        auxiliary = trainer_input.auxiliary_buffers.get(strategy.sft_dataset_name)
        selection = PrioritySelection(
            store,
            stage.stage_name,
            buffer,
            max_staleness=strategy.staleness_limit,
            seed=seed,
            auxiliary="" if auxiliary is None else auxiliary.name,
        )
    return ExploredSampler(
        store,
        synchronizer,
        selection,
        stage=stage.stage_name,
        train_batch_size=train_batch_size,
        # a contract may yet drop rows of a step that is not over
        max_read_timeout=None
        if any(each.action != "warn" for each in stage.contracts)
        else buffer.max_read_timeout,
        max_staleness=strategy.staleness_limit,
        whole_groups=buffer.whole_groups,
    )


def _dataset(
    buffer: ExperienceBufferConfig, key: str, stage: StageConfig, inputs: StageInputs, store: WritableStore
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
