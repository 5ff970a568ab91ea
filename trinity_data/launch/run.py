"""A run from start to end: checks first, then the store, Ray, trainer and engines, then stage after stage.

Nothing is started or written before the pipeline file has been found sound.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock

from trinity_data.config import RunConfig, StageConfig, load_pipeline_file
from trinity_data.config.gpus import count_gpus
from trinity_data.config.preflight import notes_about_machine
from trinity_data.config.run import TRAINER
from trinity_data.errors import ClusterLostError, ConflictError, NoClusterError, TrinityError
from trinity_data.launch.bench import BenchResults, bench
from trinity_data.launch.check import add_diagnostics, check_run
from trinity_data.launch.cluster import local_ray, until_ray_is_lost, usable_gpus
from trinity_data.launch.compute import Compute, NextStage, RunContext, check_gpus
from trinity_data.launch.configuration import reopen_last_stage, take_configuration
from trinity_data.launch.explore_part import ExplorePart
from trinity_data.launch.inputs import RunInputs, open_inputs
from trinity_data.launch.job_folder import (
    job_folder,
    new_name_if_not_continued,
    write_configuration,
)
from trinity_data.launch.live_roles import show_participants
from trinity_data.launch.live_view import watch
from trinity_data.launch.models import check_model
from trinity_data.launch.named_ray import is_named, until_cluster_is_lost
from trinity_data.launch.open_stages import open_stages
from trinity_data.launch.peer import LedgerPeer
from trinity_data.launch.shared_ray import shared_run
from trinity_data.launch.stage import StageRun
from trinity_data.launch.task_output import check_output, write_output
from trinity_data.launch.timeline import write_timeline
from trinity_data.launch.workflows import notes_about_code
from trinity_data.log_files import RUN, LogFiles
from trinity_data.monitor import build_monitor
from trinity_data.nodes import this_node
from trinity_data.processes import relaxed_gc
from trinity_data.restart_log import RestartLog
from trinity_data.restarts import RestartLimit
from trinity_data.shutdown import Shutdown
from trinity_data.stage_inputs import StageInputs
from trinity_data.status import Status
from trinity_data.store.remote import RemoteStore
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_data.tokenizer import vocabulary
from trinity_data.weights import HeldVersions, WeightFolders
from trinity_operators.stage_arguments import asking_operator

log = logging.getLogger(__name__)

LOSS_SECONDS = 2.0
"""Until the loss of a Ray is known."""


def run_pipeline(
    pipeline: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    quiet: bool = False,
    accept_changes: bool = False,
    stop: Shutdown | None = None,
    show: Callable[[BenchResults], None] | None = None,
) -> Path:
    """Loads and runs a pipeline file, or the same as a dict; returns the job folder.

    In a thread of its own where an event loop runs already, as in a notebook. `show` gets what stages of mode
    `bench` have found. Raises what `run` raises.
    """
    config = load_pipeline_file(pipeline, overrides, more=add_diagnostics)
    stop = stop or Shutdown()
    start = partial(run, config, quiet=quiet, accept_changes=accept_changes, stop=stop, show=show)
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
    config: RunConfig,
    *,
    quiet: bool = False,
    accept_changes: bool = False,
    stop: Shutdown | None = None,
    show: Callable[[BenchResults], None] | None = None,
) -> Path:
    """Runs or resumes the pipeline file; returns the job folder.

    Raises TrinityError for what a user can fix, KeyboardInterrupt when it was stopped. With
    `accept_changes` a run goes on with another reward, operator or method than it was begun with.
    """
    stop = stop or Shutdown()
    check_run(config)
    trained = tuple(stage for stage in config.stages if not stage.evaluates_only)
    if trained:
        config = new_name_if_not_continued(config)
        training = config.model_copy(update={"stages": trained})
        _train(training, quiet=quiet, accept_changes=accept_changes, stop=stop)
    for stage in config.stages[len(trained) :]:
        results = bench(config, stage, quiet=quiet, stop=stop)
        if show is not None:
            show(results)
    return config.job_dir


def _train(config: RunConfig, *, quiet: bool, accept_changes: bool, stop: Shutdown) -> None:
    """Goes on from the ledger with another Ray, its own or the one that the processes of a run share, where
    Ray is lost.
    """
    restarts = RestartLimit(max(stage.cluster.max_restarts for stage in config.stages))
    losses: list[ClusterLostError] = []
    while True:
        try:
            _train_once(config, losses, quiet=quiet, accept_changes=accept_changes, stop=stop)
            return
        except ClusterLostError as error:
            if isinstance(error, NoClusterError) and is_named():
                # it was waited for
                raise
            losses += [] if isinstance(error, NoClusterError) else [error]
            delay = restarts.next_delay() if losses and not stop.times else None
            if delay is None:
                raise
            log.warning("%s; this command goes on with another", error)
            time.sleep(delay)


def _train_once(
    config: RunConfig,
    losses: Sequence[ClusterLostError],
    *,
    quiet: bool,
    accept_changes: bool,
    stop: Shutdown,
) -> None:
    """`losses` are of each Ray before, in this process."""
    status = Status(run=f"{config.project}/{config.name}")
    with ExitStack() as stack:
        stack.enter_context(watch(status, quiet=quiet))
        shared = (
            stack.enter_context(shared_run(config, config.part, session=len(losses))) if config.part else None
        )
        job_dir = stack.enter_context(job_folder(config)) if shared is None else config.job_dir
        logs = LogFiles.of_job(job_dir, config.log)
        stack.enter_context(logs.of_run(config.part.rpartition(":")[2] or RUN))
        for note in (*config.notes, *notes_about_machine(config), *notes_about_code(config)):
            log.warning("%s", note)
        store = _open_store(job_dir, stack) if shared is None else shared.store
        if losses:
            RestartLog(store, status, kind="ray").restarted(
                config.part or "run", f"has another; {losses[-1]}"
            )
        configurations = take_configuration(config, store, accept_changes=accept_changes)
        write_configuration(config, job_dir)
        reopen_last_stage(config, store, configurations)
        stages_left = open_stages(config, store)
        if not stages_left:
            log.info(
                "every stage of %s is done; raise buffer.total_steps of the last one to go on, "
                "or give the run another `name` to start anew",
                job_dir,
            )
            return
        with ThreadPoolExecutor(1) as pool:
            # importing and making take as long as starting Ray; they go on beside each other
            preparing = pool.submit(_prepare, config, stages_left)
            local = local_ray(config, wait_seconds=config.sync_timeout if losses else 0.0)
            env = stack.enter_context(local) if shared is None else shared.env
            if stop.installed:
                stop.install()  # Ray puts a handler of its own in place
            stack.enter_context(relaxed_gc())
            restarts = RestartLog(store, status, kind="engine")
            computing = _compute(config, stages_left, env=env, restarts=restarts, logs=logs)
            peer = None if shared is None else _peer(config, shared.store)
            context = RunContext(config, preparing, store, status, computing, configurations, stop, peer)
            stages = _run_stages(context, stages_left)
            if shared is not None:
                shown = show_participants(status, shared.store, shared.participant)
                stages = _unless_lost(shared.until_lost, stages, shown)
            else:
                stages = _unless_lost(until_cluster_is_lost if is_named() else until_ray_is_lost, stages)
            stop.run(stages)
        store.seal()
        log.info("done: %s", job_dir)


def _open_store(job_dir: Path, stack: ExitStack) -> Store:
    store = Store.create_or_open(job_dir / "store")
    stack.callback(store.close)
    return store


def _compute(
    config: RunConfig,
    stages: Sequence[StageConfig],
    *,
    env: Mapping[str, str],
    restarts: RestartLog,
    logs: LogFiles,
) -> Compute:
    """Engines and ranks of these stages. Raises where there are not GPUs enough for them."""
    num_gpus = usable_gpus(config)
    check_gpus(stages, num_gpus)
    return Compute(
        num_gpus=num_gpus,
        machine_has_gpus=count_gpus() > 0,
        env=env,
        restarts=restarts,
        on_cluster=is_named(),
        logs=logs,
    )


def _peer(config: RunConfig, store: RemoteStore) -> LedgerPeer:
    """The other process of the run."""
    (stage,) = config.stages
    return LedgerPeer(store, stage.stage_name, explorer=stage.explorer.name if stage.explores else None)


def _prepare(config: RunConfig, stages_left: Sequence[StageConfig]) -> StageInputs:
    """Model and task sets as folders, and the tokenizer."""
    # explorer and trainer that start at the same time make the same files
    with FileLock(config.job_dir / "inputs.lock") if config.part else nullcontext():
        inputs = open_inputs(config, stages_left, RunInputs(config))
    check_model(config.stages, inputs.model_path, inputs.tokenizer)
    for stage in stages_left:
        if stage.explores:
            # the engines that an operator asks start later
            asks = asking_operator(stage, inputs.base_dir) is not None
            (check_output if asks else write_output)(stage, inputs)
    return inputs


async def _unless_lost(
    until_lost: Callable[[], Coroutine[Any, Any, None]],
    work: Coroutine[Any, Any, None],
    *beside: Coroutine[Any, Any, None],
) -> None:
    """Ends `work` with the cause where the Ray or the store of the run is gone, as `until_lost` raises it,
    though something else may have failed first for want of it. What runs `beside` it ends with it.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            others = [tasks.create_task(each) for each in (until_lost(), *beside)]
            await work
            for task in others:
                task.cancel()
    except BaseExceptionGroup as group:
        cause = _first_cause(group)
        with suppress(TimeoutError):
            if isinstance(cause, Exception):
                await asyncio.wait_for(until_lost(), LOSS_SECONDS)
        raise cause from group


async def _run_stages(context: RunContext, stages_left: Sequence[StageConfig]) -> None:
    """Stage after stage of those that are not done.

    Raises the first cause where explorer and trainer fail as a group.
    """
    store, computing, first = context.store, context.computing, stages_left[0]
    context.status.activity = "starting trainer and engines"
    try:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(computing.close)
            stack.callback(context.kept_workers.close)
            if first.trains:
                computing.start_ranks(first)
            inputs = await asyncio.wrap_future(context.preparing)
            computing.model_path, computing.tokenizer = inputs.model_path, inputs.tokenizer
            computing.auxiliary_models = inputs.auxiliary_models
            # of several processes, the first that samples tokens names them
            if context.config.part != TRAINER and not store.table("vocabulary").num_rows:
                rows, once = {"vocabulary": vocabulary(inputs.tokenizer)}, {"vocabulary": None}
                with suppress(ConflictError):
                    store.commit(Commit(tables=rows, progress={"vocabulary": True}, expected=once))
            next_stage = NextStage(context)
            stack.push_async_callback(next_stage.close)
            if first.explores:
                next_stage.start()  # beside the trainer's start
            first_step = 1
            for stage in context.config.stages:
                last_step = store.stage_ended_at(stage.stage_name)
                if last_step is None or stage in stages_left:
                    last_step = await _run_stage(context, next_stage, stage, first_step)
                first_step = last_step + 1
    except BaseExceptionGroup as group:
        raise _first_cause(group) from group


async def _run_stage(context: RunContext, next_stage: NextStage, stage: StageConfig, first_step: int) -> int:
    """With ranks, a monitor and folders for weights of the stage's own; returns its last step."""
    config, job_dir = context.config, context.store.root.parent
    with ExitStack() as stack:
        if config.monitor.enable_ray_timeline:
            stack.callback(write_timeline, job_dir)
        monitor = build_monitor(
            config.monitor,
            project=config.project,
            name=config.name,
            stage=stage.stage_name if config.has_named_stages else None,
            job_dir=job_dir,
            part=config.part,
        )
        stack.callback(monitor.close)
        if not stage.trains:
            return await ExplorePart(context, stage, next_stage, monitor).run()
        ranks = await context.computing.ranks(stage)
        if stage.explores:
            next_stage.start()
        # ranks elsewhere write weights, as they do checkpoints, into the folder of the job
        is_here = not set(ranks.nodes) - {this_node()}
        method = stage.synchronizer.weights_method if is_here else "checkpoint"
        folders = HeldVersions() if stage.sends_weights else WeightFolders(job_dir, method, this_node())
        stack.callback(folders.close)
        return await StageRun(context, stage, first_step, ranks, folders, next_stage, monitor).run()


def _first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves.append(_first_cause(error) if isinstance(error, BaseExceptionGroup) else error)
    return next((error for error in leaves if isinstance(error, TrinityError)), leaves[0])
