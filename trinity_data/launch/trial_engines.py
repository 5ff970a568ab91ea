"""The engines of a stage outside its run, for task operators that ask them.

They have the model that the pipeline file names. What they were asked is on record in a run of its own, where
runs of the same project find it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from typing import TypeVar

from trinity_data.config import RunConfig, StageConfig, engines_of
from trinity_data.config.explorer import choose_engine_type
from trinity_data.config.gpus import count_gpus
from trinity_data.errors import ConfigError
from trinity_data.launch.cluster import local_ray, usable_gpus
from trinity_data.launch.compute import Compute, engine_shape, runner_of
from trinity_data.launch.job_folder import job_folder
from trinity_data.launch.live_view import watch
from trinity_data.launch.named_ray import is_named
from trinity_data.launch.task_probes import build_prober
from trinity_data.launch.workflows import ask_for_defaults, process_settings, workflow_finder
from trinity_data.log_files import LogFiles
from trinity_data.restart_log import RestartLog
from trinity_data.stage_inputs import StageInputs
from trinity_data.status import Status
from trinity_data.store.store import Store
from trinity_data.weights import Weights
from trinity_explorer.workflows.pool import WorkflowPool
from trinity_operators.task_engines import TaskEngines

log = logging.getLogger(__name__)
_T = TypeVar("_T")

SUFFIX = "-tasks"
"""Of the name of the run that has the record."""


def with_engines(
    config: RunConfig,
    stage: StageConfig,
    inputs: StageInputs,
    work: Callable[[TaskEngines], _T],
) -> _T:
    """What `work` returns, which runs in a thread and may ask the engines; they are closed then.

    Raises ConfigError where the machine lacks their GPUs.
    """
    own = config.model_copy(update={"name": f"{config.name}{SUFFIX}"})
    status = Status(run=f"{own.project}/{own.name}", stage=stage.stage_name)
    with ExitStack() as stack:
        # the answer goes to standard output
        stack.enter_context(watch(status, quiet=False, to_stderr=True))
        store = Store.create_or_open(stack.enter_context(job_folder(own)) / "store")
        stack.callback(store.close)
        restarts = RestartLog(store, status, kind="engine")
        computing = stack.enter_context(computing_without_ranks(own, stage, inputs, restarts))
        return asyncio.run(_asked(stage, inputs, store, status, computing, work))


@contextmanager
def computing_without_ranks(
    own: RunConfig, stage: StageConfig, inputs: StageInputs, restarts: RestartLog
) -> Iterator[Compute]:
    """For the engines of a stage that is not trained, with its rollouts on record in the folder of `own`.

    Ray is there until the block ends, unless every engine is a fake one. Raises ConfigError where the machine
    lacks their GPUs.
    """
    types = [choose_engine_type(engine.engine_type) for _, engine in engines_of(stage.explorer)]
    with ExitStack() as stack:
        num_gpus, env = 0, dict[str, str]()
        if set(types) != {"fake"}:
            env |= stack.enter_context(local_ray(own))
            num_gpus = usable_gpus(own)
        if engine_shape(stage).num_gpus > num_gpus:
            raise ConfigError(
                f"stage {stage.stage_name!r}: its engines need {engine_shape(stage).num_gpus} GPU(s), found "
                f"{num_gpus}; ask for fewer, or set cluster.gpu_per_node=0"
            )
        log.info(
            "stage %s: starts its engines (%s) with %s; rollouts are on record in %s",
            stage.stage_name, ", ".join(types), inputs.model_path, own.job_dir,
        )  # fmt: skip
        computing = Compute(
            num_gpus=num_gpus,
            machine_has_gpus=count_gpus() > 0,
            env=env,
            restarts=restarts,
            on_cluster=is_named(),
            logs=LogFiles.of_job(own.job_dir, own.log),
            model_path=inputs.model_path,
            tokenizer=inputs.tokenizer,
        )
        computing.auxiliary_models = inputs.auxiliary_models
        yield computing


async def _asked(
    stage: StageConfig,
    inputs: StageInputs,
    store: Store,
    status: Status,
    computing: Compute,
    work: Callable[[TaskEngines], _T],
) -> _T:
    async with AsyncExitStack() as stack:
        stack.push_async_callback(computing.close)
        workflows = await stack.enter_async_context(WorkflowPool(process_settings(stage)))
        ask_for_defaults(workflows, stage, inputs.base_dir)
        prober = build_prober(stage, inputs, store, status)
        assert prober is not None
        stack.callback(prober.close)
        engines, _ = await asyncio.gather(computing.engines(stage), workflows.start())
        find = workflow_finder(workflows, stage, inputs.base_dir)
        # an engine starts with the model itself, which is version 0
        prober.open(runner_of(stage, inputs, engines, find), Weights(0, inputs.model_path))
        return await asyncio.to_thread(work, prober)
