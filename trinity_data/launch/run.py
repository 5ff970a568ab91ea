"""A run from start to end: checks first, then the store, Ray, trainer and engines, then stage after stage.

Nothing is started or written before the pipeline file has been found sound.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray

from trinity_data.config import RunConfig, StageConfig
from trinity_data.config.names import check_workflows
from trinity_data.config.preflight import check_machine
from trinity_data.errors import TrinityError
from trinity_data.launch.job import job_folder, log_to_file, new_name_if_not_continued
from trinity_data.launch.pipelines import experience_operators, task_operator_specs
from trinity_data.launch.resources import Resources
from trinity_data.launch.stage import StageRun, Workplace, task_stream
from trinity_data.launch.view import watch
from trinity_data.monitor import build_monitor
from trinity_data.pipeline.registry import build_operators
from trinity_data.pipeline.runner import check_columns
from trinity_data.pipeline.stream import TaskStream
from trinity_data.schema import EXPERIENCES
from trinity_data.status import Status
from trinity_data.store.store import Store
from trinity_data.tokenizer import load_tokenizer
from trinity_data.weights import WeightFolders
from trinity_explorer.engines.pool import EnginePool, build_engines
from trinity_explorer.rewards.math import REWARDS
from trinity_explorer.workflows.registry import WORKFLOWS
from trinity_trainer.group import TrainerGroup, start_trainer

log = logging.getLogger(__name__)

# Ray's own bookkeeping; rows live in the store, so its object store only passes batches on
OBJECT_STORE_BYTES = 256 * 2**20


def run(config: RunConfig, *, quiet: bool = False) -> Path:
    """Runs or resumes the pipeline file; returns the job folder. Raises TrinityError for what a person can mend."""
    check_machine(config)
    check_operators(config)
    config = new_name_if_not_continued(config)
    status = Status(run=f"{config.project}/{config.name}")
    with ExitStack() as stack:
        stack.enter_context(watch(status, quiet=quiet))
        job_dir = stack.enter_context(job_folder(config))
        stack.enter_context(log_to_file(job_dir, config.log.level))
        for note in config.notes:
            log.warning("%s", note)
        store = Store.create_or_open(job_dir / "store")
        stack.callback(store.close)
        if all(_is_done(store, stage) for stage in config.stages):
            log.info("every stage of %s is done; give the run another `name` to start anew", job_dir)
            return job_dir
        with ThreadPoolExecutor(1) as pool:
            # importing and making take as long as starting Ray; they go on beside each other
            preparing = pool.submit(_prepare, config)
            stack.enter_context(local_ray(config))
            resources, tokenizer = preparing.result()
        asyncio.run(_unwrapped(_run_stages(config, job_dir, store, status, resources, tokenizer)))
        store.seal()
        log.info("done: %s", job_dir)
    return job_dir


def check_operators(config: RunConfig) -> None:
    """Builds every operator once, so that a wrong name or argument is told before anything starts."""
    check_workflows(config, WORKFLOWS, REWARDS)
    base_dir = config.file.parent
    for stage in config.stages:
        if stage.mode == "both":
            build_operators(task_operator_specs(stage, base_dir))
            check_columns(experience_operators(stage, base_dir), EXPERIENCES.names)


@contextmanager
def local_ray(config: RunConfig) -> Iterator[None]:
    """The cluster that RAY_ADDRESS names, or one of our own on the loopback interface."""
    if os.environ.get("RAY_ADDRESS"):
        ray.init(namespace=f"{config.project}/{config.name}", log_to_driver=False, logging_level="ERROR")
    else:
        # trainer and engines are what the machine is for; Ray would start them at the lowest priority
        os.environ.setdefault("RAY_worker_niceness", "0")
        ray.init(
            # tasks of the stream must fit beside each other; actors of ours ask for no cpu
            num_cpus=max(4, os.cpu_count() or 1),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=OBJECT_STORE_BYTES,
            namespace=f"{config.project}/{config.name}",
            _node_ip_address="127.0.0.1",
        )
    try:
        yield
    finally:
        ray.shutdown()


def _prepare(config: RunConfig) -> tuple[Resources, Any]:
    """Model and task set as folders, and the tokenizer."""
    resources = Resources(config)
    return resources, load_tokenizer(resources.model_path)


async def _run_stages(
    config: RunConfig, job_dir: Path, store: Store, status: Status, resources: Resources, tokenizer: Any
) -> None:
    gpus = int(ray.cluster_resources().get("GPU", 0))
    first = config.stages[0]
    engines = _EngineStart(config, resources, tokenizer, gpus)
    monitor = build_monitor(config.monitor, project=config.project, name=config.name, job_dir=job_dir)
    folders = WeightFolders(job_dir, "memory" if first.synchronizer.sync_method == "memory" else "checkpoint")
    streams = _start_streams(config, resources, store, status)
    ranks: TrainerGroup | None = None
    try:
        status.activity = "starting trainer and engines"
        ranks = await start_trainer(resources.model_path, world_size=first.trainer.world_size, num_gpus=gpus)
        place = Workplace(
            config, resources, job_dir, store, status, monitor, ranks, engines, folders, tokenizer
        )
        await _stage_by_stage(place, streams)
    finally:
        for stream in streams.values():
            await stream.close()
        await engines.close()
        if ranks is not None:
            ranks.kill()
        folders.close()
        monitor.close()


def _start_streams(
    config: RunConfig, resources: Resources, store: Store, status: Status
) -> dict[str, TaskStream]:
    """The first exploring stage's stream begins with the run, because its first rows take seconds to come."""
    for stage in config.stages:
        if stage.mode == "both" and not _is_done(store, stage):
            stream = task_stream(stage, config, resources, store, status)
            stream.start()
            return {stage.stage_name: stream}
    return {}


async def _stage_by_stage(place: Workplace, streams: Mapping[str, TaskStream]) -> None:
    first_step = 1
    for stage in place.config.stages:
        done = place.store.progress(f"stage_done/{stage.stage_name}")
        run = StageRun(place, stage, first_step, streams.get(stage.stage_name))
        last = int(done) if done is not None else await run.run()
        first_step = last + 1


class _EngineStart:
    """Starts the engines while something else goes on, if a stage will need them; awaited by calling it."""

    def __init__(self, config: RunConfig, resources: Resources, tokenizer: Any, num_gpus: int) -> None:
        stage = next((stage for stage in config.stages if stage.mode == "both"), None)
        self.task: asyncio.Task[EnginePool] | None = None
        if stage is not None:
            start = build_engines(
                stage.explorer.rollout_model,
                stage.model,
                model_path=resources.model_path,
                tokenizer=tokenizer,
                num_gpus=num_gpus,
                env=dict(stage.explorer.env_vars),
            )
            self.task = asyncio.create_task(start)

    async def __call__(self) -> EnginePool:
        assert self.task is not None
        return await asyncio.shield(self.task)

    async def close(self) -> None:
        if self.task is None:
            return
        if not self.task.done():
            self.task.cancel()
        elif self.task.exception() is None:
            await self.task.result().close()


def _is_done(store: Store, stage: StageConfig) -> bool:
    return store.progress(f"stage_done/{stage.stage_name}") is not None


async def _unwrapped(work: Any) -> None:
    """Explorer and trainer fail as a group; a person wants the first cause."""
    try:
        await work
    except BaseExceptionGroup as group:
        raise _first_cause(group) from group


def _first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves.append(_first_cause(error) if isinstance(error, BaseExceptionGroup) else error)
    return next((error for error in leaves if isinstance(error, TrinityError)), leaves[0])
