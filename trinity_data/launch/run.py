"""A run from start to end: checks first, then the store, Ray, trainer and engines, then stage after stage.

Nothing is started or written before the pipeline file has been found sound.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from trinity_data.config import RunConfig, StageConfig, load_pipeline_file
from trinity_data.config.gpus import count_gpus
from trinity_data.config.preflight import notes_about_machine
from trinity_data.errors import TrinityError
from trinity_data.launch.check import add_diagnostics, check_run
from trinity_data.launch.cluster import free_gpus, local_ray
from trinity_data.launch.compute import Compute, check_gpus
from trinity_data.launch.configuration import Configurations, reopen_last_stage, take_configuration
from trinity_data.launch.inputs import RunInputs
from trinity_data.launch.job_folder import (
    job_folder,
    log_to_file,
    new_name_if_not_continued,
    write_configuration,
)
from trinity_data.launch.live_view import watch
from trinity_data.launch.models import check_model
from trinity_data.launch.stage import NextStage, RunContext, StageRun
from trinity_data.monitor import build_monitor
from trinity_data.processes import relaxed_gc
from trinity_data.progress import stage_done_key
from trinity_data.shutdown import Shutdown
from trinity_data.status import Status
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_data.tokenizer import load_tokenizer, vocabulary
from trinity_data.weights import WeightFolders

log = logging.getLogger(__name__)


def run_pipeline(
    pipeline: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    quiet: bool = False,
    accept_changes: bool = False,
    stop: Shutdown | None = None,
) -> Path:
    """Loads and runs a pipeline file, or the same as a dict; returns the job folder.

    In a thread of its own where an event loop runs already, as in a notebook. Raises what `run` raises.
    """
    config = load_pipeline_file(pipeline, overrides, more=add_diagnostics)
    stop = stop or Shutdown()
    start = partial(run, config, quiet=quiet, accept_changes=accept_changes, stop=stop)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return start()
    with ThreadPoolExecutor(1) as thread:
        doing = thread.submit(start)
        try:
            return doing.result()
        except KeyboardInterrupt:
            stop.begin()
            return doing.result()


def run(
    config: RunConfig, *, quiet: bool = False, accept_changes: bool = False, stop: Shutdown | None = None
) -> Path:
    """Runs or resumes the pipeline file; returns the job folder.

    Raises TrinityError for what a person can mend, KeyboardInterrupt when it was told to stop. With
    `accept_changes` a run goes on with another reward, operator or method than it was begun with.
    """
    stop = stop or Shutdown()
    check_run(config)
    config = new_name_if_not_continued(config)
    status = Status(run=f"{config.project}/{config.name}")
    with ExitStack() as stack:
        stack.enter_context(watch(status, quiet=quiet))
        job_dir = stack.enter_context(job_folder(config))
        stack.enter_context(log_to_file(job_dir, config.log.level))
        for note in (*config.notes, *notes_about_machine(config)):
            log.warning("%s", note)
        store = Store.create_or_open(job_dir / "store")
        stack.callback(store.close)
        configurations = take_configuration(config, store, accept_changes=accept_changes)
        write_configuration(config, job_dir)
        reopen_last_stage(config, store, configurations)
        if all(_is_done(store, stage) for stage in config.stages):
            log.info(
                "every stage of %s is done; raise buffer.total_steps of the last one to go on, "
                "or give the run another `name` to start anew",
                job_dir,
            )
            return job_dir
        with ThreadPoolExecutor(1) as pool:
            # importing and making take as long as starting Ray; they go on beside each other
            preparing = pool.submit(_prepare, config)
            env = stack.enter_context(local_ray(config))
            if stop.installed:
                stop.install()  # Ray puts a handler of its own in place
            stack.enter_context(relaxed_gc())
            work = _run_stages(config, job_dir, store, status, preparing, env, configurations, stop)
            stop.run(_first_cause_of(work))
        store.seal()
        log.info("done: %s", job_dir)
    return job_dir


def _prepare(config: RunConfig) -> tuple[RunInputs, Any]:
    """Model and task set as folders, and the tokenizer."""
    resources = RunInputs(config)
    tokenizer = load_tokenizer(resources.model_path)
    check_model(config.stages, resources.model_path, tokenizer)
    return resources, tokenizer


async def _run_stages(
    config: RunConfig,
    job_dir: Path,
    store: Store,
    status: Status,
    preparing: Future[tuple[RunInputs, Any]],
    env: Mapping[str, str],
    configurations: Configurations,
    stop: Shutdown,
) -> None:
    first, num_gpus = _first_open(config, store), min(config.num_gpus, free_gpus())
    check_gpus([stage for stage in config.stages if not _is_done(store, stage)], num_gpus)
    status.activity = "starting trainer and engines"
    async with AsyncExitStack() as stack:
        computing = Compute(num_gpus=num_gpus, machine_has_gpus=count_gpus() > 0, env=env)
        stack.push_async_callback(computing.close)
        computing.start_ranks(first)
        resources, computing.tokenizer = await asyncio.wrap_future(preparing)
        computing.model_path = resources.model_path
        if not store.table("vocabulary").num_rows:
            store.submit(Commit(tables={"vocabulary": vocabulary(computing.tokenizer)}))
        place = RunContext(
            config=config,
            resources=resources,
            job_dir=job_dir,
            store=store,
            status=status,
            computing=computing,
            configurations=configurations,
            stop=stop,
        )
        ahead = NextStage(place)
        stack.push_async_callback(ahead.close)
        if first.mode == "both":
            ahead.start()  # beside the trainer's start
        await _stage_by_stage(place, ahead)


def _first_open(config: RunConfig, store: Store) -> StageConfig:
    return next(stage for stage in config.stages if not _is_done(store, stage))


async def _stage_by_stage(place: RunContext, ahead: NextStage) -> None:
    first_step = 1
    for stage in place.config.stages:
        done = place.store.progress(stage_done_key(stage.stage_name))
        last = int(done) if done is not None else await _run_stage(place, ahead, stage, first_step)
        first_step = last + 1


async def _run_stage(place: RunContext, ahead: NextStage, stage: StageConfig, first_step: int) -> int:
    """With ranks, engines, a monitor and a way for weights of the stage's own."""
    config = place.config
    with ExitStack() as stack:
        monitor = build_monitor(
            config.monitor,
            project=config.project,
            name=config.name,
            stage=stage.stage_name if config.has_named_stages else None,
            job_dir=place.job_dir,
        )
        stack.callback(monitor.close)
        ranks = await place.computing.ranks(stage)
        if stage.mode == "both":
            ahead.start()
        folders = WeightFolders(place.job_dir, stage.synchronizer.weights_method)
        stack.callback(folders.close)
        return await StageRun(place, stage, first_step, ranks, folders, ahead, monitor).run()


def _is_done(store: Store, stage: StageConfig) -> bool:
    return store.progress(stage_done_key(stage.stage_name)) is not None


async def _first_cause_of(work: Coroutine[Any, Any, None]) -> None:
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
