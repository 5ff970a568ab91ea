"""The tasks that the next step would get, beside those it chooses from. Nothing is run or written.

Of a run its store is read. Without one a part of each task set passes through the task operators here, into a
store that is gone afterwards.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trinity_data.config import RunConfig, StageConfig, TasksetConfig
from trinity_data.dataset.reader import Source, row_order
from trinity_data.dataset.task import Task
from trinity_data.errors import ConfigError, unknown_name
from trinity_data.launch.inputs import RunInputs, pipeline_of_file
from trinity_data.progress import explored_key
from trinity_data.stage_inputs import num_steps
from trinity_data.store.reader import StoreReader
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_data.synchronizer import Synchronizer
from trinity_explorer.curriculum.build import build_history, build_mixer, load_pool
from trinity_explorer.curriculum.history import History, tried_tasks
from trinity_explorer.curriculum.pool import Floats, Places, TaskPool
from trinity_operators.registry import build_operators
from trinity_operators.task_filtering import read_and_filter

NUM_BINS = 10


@dataclass(frozen=True)
class Bin:
    """Tasks whose value lies between two bounds; the last bin has its upper one too."""

    lower: float
    upper: float
    tasks: int
    chosen: int


@dataclass(frozen=True)
class SetPreview:
    """Of one task set: what the step gets, and by each number that is known of every task."""

    taskset: str
    num_tasks: int
    chosen: list[str]
    """Ids of tasks."""
    histograms: dict[str, list[Bin]]


@dataclass(frozen=True)
class Preview:
    stage: str
    step: int
    from_run: bool
    """Whether the run's store was read, or a part of the task sets."""
    has_ended: bool
    """Whether the stage has explored its last step, so that `step` comes only where the stage gets longer."""
    tasksets: list[SetPreview]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def preview(config: RunConfig, *, stage_name: str | None = None, num_rows: int = 2000) -> Preview:
    """The next step of a stage: of the named one, or of the first that explores and has not ended.

    `num_rows` of each task set are read where there is no run yet.
    """
    with _opened(config, stage_name, num_rows) as (store, stage, from_run):
        first_step = _first_step(config, stage, store)
        synchronizer = Synchronizer(stage.synchronizer, first_step=first_step)
        explored = store.progress(explored_key(stage.stage_name))
        step = first_step if explored is None else explored + 1
        length = num_steps(stage)
        is_done = store.stage_ended_at(stage.stage_name) is not None
        has_ended = is_done or (length is not None and step >= first_step + length)
        chosen = asyncio.run(_next_tasks(config, stage, store, synchronizer, step))
        sets = []
        for _, taskset in stage.buffer.explorer_input.train_tasksets():
            pool = load_pool(store, stage.stage_name, taskset)
            history = build_history(stage, taskset, store=store, synchronizer=synchronizer)
            ids = [task.task_id for task in chosen if task.taskset == taskset.name]
            places = pool.places(pa.array(ids, pa.string()))
            values = _values(pool, taskset, history, step, first_step)
            histograms = {name: histogram(each, places) for name, each in values.items()}
            sets.append(SetPreview(taskset.name, len(pool), ids, histograms))
    return Preview(stage.stage_name, step, from_run, has_ended, sets)


def histogram(values: Floats, chosen: Places) -> list[Bin]:
    """Bins of equal width from the least to the greatest value, of tasks that have one; one bin where
    all are equal.
    """
    known = values[np.isfinite(values)]
    if not len(known):
        return []
    least, greatest = float(known.min()), float(known.max())
    if least == greatest:
        return [Bin(least, greatest, len(known), int(np.isfinite(values[chosen]).sum()))]
    counts, edges = np.histogram(known, bins=NUM_BINS)
    picked, _ = np.histogram(values[chosen], bins=edges)
    return [
        Bin(float(lower), float(upper), int(count), int(number))
        for lower, upper, count, number in zip(edges[:-1], edges[1:], counts, picked, strict=True)
    ]


@contextmanager
def _opened(
    config: RunConfig, stage_name: str | None, num_rows: int
) -> Iterator[tuple[StoreReader, StageConfig, bool]]:
    """A store with the tasks of the stage that is meant, and whether it is the run's."""
    root = config.job_dir / "store"
    if (root / "ledger.sqlite").exists():
        reader = StoreReader(root)
        try:
            stage = _stage(config, stage_name, reader)
            if reader.table("tasks", columns=["task_id"], stage=stage.stage_name).num_rows:
                yield reader, stage, True
                return
        finally:
            reader.close()
    stage = _stage(config, stage_name, None)
    with tempfile.TemporaryDirectory() as folder:
        store = Store.create_or_open(Path(folder) / "store")
        try:
            for _, taskset in stage.buffer.explorer_input.train_tasksets():
                _read_some(store, config, stage, taskset, Path(folder), num_rows)
            yield store, stage, False
        finally:
            store.close()


def _stage(config: RunConfig, name: str | None, store: StoreReader | None) -> StageConfig:
    stages = {stage.stage_name: stage for stage in config.stages if stage.explored_tasksets}
    if not stages:
        raise ConfigError("no stage of this file explores tasks; mode: both does")
    if name is not None and name not in stages:
        raise ConfigError(unknown_name("exploring stage", name, stages))
    if name is not None:
        return stages[name]
    is_open = (each for each in stages if store is None or store.stage_ended_at(each) is None)
    return stages[next(is_open, list(stages)[-1])]


def _first_step(config: RunConfig, stage: StageConfig, store: StoreReader) -> int:
    """As far as the stages before it have ended, or say how long they are."""
    step = 1
    for earlier in config.stages[: [each.stage_name for each in config.stages].index(stage.stage_name)]:
        done = store.stage_ended_at(earlier.stage_name)
        step = step + (num_steps(earlier) or 0) if done is None else done + 1
    return step


def _read_some(
    store: Store, config: RunConfig, stage: StageConfig, taskset: TasksetConfig, folder: Path, num_rows: int
) -> None:
    resources = RunInputs(config, folder)
    source = Source(resources.source(taskset))
    seed = taskset.task_selector.seed
    order = row_order(source.num_rows, shuffle=taskset.shuffle, seed=seed)
    if not taskset.is_streamed:
        order = np.sort(row_order(source.num_rows, shuffle=True, seed=seed)[:num_rows])
    pipeline = pipeline_of_file(
        config, stage, lambda each: resources.source(each).path, model_path=resources.model_path
    )
    operators = build_operators(pipeline.operators, config.file.parent)
    for part in read_and_filter(taskset, source, order[:num_rows], operators, stage=stage.stage_name):
        store.commit(Commit(tables={"tasks": part.tasks}))


class _StoredTasks:
    """The kept tasks of a set that are in the store, as a stream would bring them."""

    def __init__(self, pool: TaskPool) -> None:
        self._tasks = iter(pool.tasks(np.arange(len(pool))))

    async def next(self) -> Task | None:
        return next(self._tasks, None)


async def _next_tasks(
    config: RunConfig, stage: StageConfig, store: StoreReader, synchronizer: Synchronizer, step: int
) -> Sequence[Task]:
    sources = {
        taskset.name: _StoredTasks(load_pool(store, stage.stage_name, taskset))
        for _, taskset in stage.buffer.explorer_input.train_tasksets()
    }
    mixer = build_mixer(stage, sources, store=store, synchronizer=synchronizer, seed=config.seed)
    tried = [each for each in tried_tasks(store, stage.stage_name) if each.step < step]
    await mixer.resume(tried)
    return [each.task for each in await mixer.take(stage.buffer.batch_size, step=step, refill=0)]


def _values(
    pool: TaskPool, taskset: TasksetConfig, history: History, step: int, first_step: int
) -> dict[str, Floats]:
    """Numbers of the pool's tasks, by name: features, scores of operators, pass rate and weight."""
    values = dict(zip(taskset.task_selector.feature_keys, pool.features.T, strict=True))
    scores = [dict(row or []) for row in pool.rows["scores"].to_pylist()]
    for name in dict.fromkeys(name for row in scores for name in row):
        values.setdefault(name, np.array([row.get(name, np.nan) for row in scores], np.float64))
    rows = history.ask("SELECT task_id, pass_rate FROM task_stats WHERE pass_rate IS NOT NULL", step)
    if rows.num_rows:
        rates = np.full(len(pool), np.nan)
        rates[pool.places(rows["task_id"])] = rows["pass_rate"].to_numpy()
        values["pass_rate"] = rates
    if taskset.curriculum is not None:
        asked_at = step - (step - first_step) % taskset.curriculum.every
        values["weight"] = history.weights(pool, taskset.curriculum, asked_at)
    return values
