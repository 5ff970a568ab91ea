"""How a stage that explores reads its batches, put together from its configuration."""

from __future__ import annotations

from collections.abc import Callable

from trinity_data.config import ExperienceBufferConfig, StageConfig
from trinity_data.store.store import Store
from trinity_data.synchronizer import Synchronizer
from trinity_trainer.offline_sampler import OfflineDataset
from trinity_trainer.sampling.explored import ExploredSampler
from trinity_trainer.sampling.mixed import MixedSampler
from trinity_trainer.sampling.priority import build_priority
from trinity_trainer.sampling.selection import FifoSelection, PrioritySelection, Selection
from trinity_trainer.trainer import BatchSampler


def batches_of(
    stage: StageConfig,
    store: Store,
    pace: Synchronizer,
    *,
    rows_at_rest: Callable[[ExperienceBufferConfig, str], OfflineDataset],
    first_step: int,
    seed: int,
) -> BatchSampler:
    """The explorer's rows, and where `mix` is asked for a share of rows from a buffer that lies ready."""
    buffer, strategy = stage.buffer, stage.algorithm.sample_strategy_args
    mixes = stage.algorithm.sample_strategy == "mix"
    num_experts = strategy.num_experts(buffer.train_batch_size) if mixes else 0
    waiting = buffer.trainer_input.experience_buffer
    explored = ExploredSampler(
        store,
        pace,
        _selection(stage, store, seed),
        stage=stage.stage_name,
        train_batch_size=buffer.train_batch_size - num_experts,
        max_read_timeout=waiting.max_read_timeout,
        max_staleness=strategy.staleness_limit,
        whole_groups=waiting.whole_groups,
    )
    if not mixes:
        return explored
    name = strategy.sft_dataset_name
    auxiliary = buffer.trainer_input.auxiliary_buffers[name]
    return MixedSampler(
        store,
        explored,
        rows_at_rest(auxiliary, f"auxiliary_buffers.{name}"),
        name=auxiliary.name,
        num_experts=num_experts,
        expert_advantage=strategy.expert_advantage,
        first_step=first_step,
        seed=seed,
        replay=replays(stage),
    )


def replays(stage: StageConfig) -> bool:
    """Whether a row may be trained more than once."""
    return stage.buffer.trainer_input.experience_buffer.replay_buffer.reuse_cooldown_time is not None


def _selection(stage: StageConfig, store: Store, seed: int) -> Selection:
    buffer, strategy = stage.buffer.trainer_input.experience_buffer, stage.algorithm.sample_strategy_args
    auxiliary = stage.buffer.trainer_input.auxiliary_buffers.get(strategy.sft_dataset_name)
    replay = buffer.replay_buffer
    if not replay.enable:
        return FifoSelection(store, stage.stage_name, whole_groups=buffer.whole_groups)
    return PrioritySelection(
        store,
        stage.stage_name,
        build_priority(replay),
        cooldown=replay.reuse_cooldown_time,
        num_used=buffer.capacity,
        max_staleness=strategy.staleness_limit,
        whole_groups=buffer.whole_groups,
        seed=seed,
        auxiliary="" if auxiliary is None else auxiliary.name,
    )
