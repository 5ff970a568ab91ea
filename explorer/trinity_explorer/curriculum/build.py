"""The samplers and selectors that a stage's configuration asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.config import StageConfig, TasksetConfig
from trinity_data.stage_inputs import num_steps
from trinity_data.store.protocol import ReadableStore
from trinity_data.synchronizer import Synchronizer
from trinity_explorer.curriculum.difficulty import DifficultySelector
from trinity_explorer.curriculum.history import History
from trinity_explorer.curriculum.pool import TaskPool
from trinity_explorer.curriculum.samplers import (
    PoolSampler,
    Sampler,
    StreamSampler,
    TaskMixer,
    TaskSource,
)
from trinity_explorer.curriculum.selectors import (
    EasyToHardSelector,
    RandomSelector,
    Selector,
    WeightSelector,
)


def build_mixer(
    stage: StageConfig,
    sources: Mapping[str, TaskSource],
    *,
    store: ReadableStore,
    synchronizer: Synchronizer,
    seed: int,
) -> TaskMixer:
    """The tasks of a stage. `sources` are of its task sets, by name."""
    tasksets = [taskset for _, taskset in stage.buffer.explorer_input.train_tasksets()]
    samplers = {
        taskset.name: build_sampler(
            stage, taskset, sources[taskset.name], store=store, synchronizer=synchronizer
        )
        for taskset in tasksets
    }
    mix = stage.buffer.explorer_input.mix
    return TaskMixer(samplers, weights=[taskset.weight for taskset in tasksets], mix=mix, seed=seed)


def build_sampler(
    stage: StageConfig,
    taskset: TasksetConfig,
    source: TaskSource,
    *,
    store: ReadableStore,
    synchronizer: Synchronizer,
) -> Sampler:
    """The tasks of one set."""
    # epochs end a stage that does not count in steps
    num_epochs = taskset.epochs or (None if num_steps(stage) is not None else stage.buffer.total_epochs)
    if taskset.is_streamed:
        seed, shuffle = taskset.task_selector.seed, taskset.shuffle
        return StreamSampler(source, num_epochs=num_epochs, seed=seed, shuffle=shuffle)
    history = build_history(stage, taskset, store=store, synchronizer=synchronizer)

    async def load() -> TaskPool:
        while await source.next() is not None:
            pass
        return await asyncio.to_thread(load_pool, store, stage.stage_name, taskset)

    build = partial(build_selector, taskset, history=history, first_step=synchronizer.first_step)
    return PoolSampler(load, build, num_epochs=num_epochs)


def build_history(
    stage: StageConfig, taskset: TasksetConfig, *, store: ReadableStore, synchronizer: Synchronizer
) -> History:
    """What a choice of tasks of this set may rest on."""
    name = stage.explorer.name
    return History(store, stage.stage_name, taskset.name, name, synchronizer.required_version)


def load_pool(store: ReadableStore, stage: str, taskset: TasksetConfig) -> TaskPool:
    """The kept tasks of a set that was read."""
    rows = store.table("tasks", stage=stage)
    rows = rows.filter(pc.equal(rows["taskset"], pa.scalar(taskset.name)))
    return TaskPool.from_rows(rows, feature_keys=taskset.task_selector.feature_keys)


def build_selector(taskset: TasksetConfig, pool: TaskPool, *, history: History, first_step: int) -> Selector:
    """Of a set that is not tried as it is read. `first_step` is the stage's."""
    selector, curriculum = taskset.task_selector, taskset.curriculum
    if curriculum is not None:
        return WeightSelector(
            partial(history.weights, pool, curriculum),
            first_step=first_step,
            every=curriculum.every,
            seed=selector.seed,
        )
    if selector.selector_type == "offline_easy2hard":
        return EasyToHardSelector(pool.features)
    if selector.selector_type == "difficulty_based":
        explored = partial(history.rates, pool)
        return DifficultySelector(
            pool.features, selector.kwargs, explored, first_step=first_step, seed=selector.seed
        )
    assert selector.selector_type == "random"
    return RandomSelector(len(pool), seed=selector.seed)
