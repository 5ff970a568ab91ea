"""Mode `bench`: a model, or every checkpoint of a run, on task sets.

What it finds is in a job folder of its own below the run's, with a store, so that the run may be trained
at the same time: nothing of the run is locked or written, and its rows stay those of training.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.atomic import replace_text
from trinity_data.config import RunConfig, StageConfig
from trinity_data.config.preflight import notes_about_machine
from trinity_data.errors import StoreError
from trinity_data.launch.checkpoints import Checkpoint, checkpoints_of
from trinity_data.launch.compute import Compute, runner_of
from trinity_data.launch.configuration import take_configuration
from trinity_data.launch.inputs import RunInputs, open_inputs
from trinity_data.launch.job_folder import (
    job_folder,
    new_name_if_not_continued,
    write_configuration,
)
from trinity_data.launch.live_view import watch
from trinity_data.launch.models import check_model
from trinity_data.launch.trial_engines import computing_without_ranks
from trinity_data.launch.workflows import (
    ask_for_defaults,
    notes_about_code,
    process_settings,
    workflow_finder,
)
from trinity_data.log_files import LogFiles
from trinity_data.monitor import Monitor, build_monitor
from trinity_data.progress import evaluated_key
from trinity_data.reporter import Reporter
from trinity_data.restart_log import RestartLog
from trinity_data.shutdown import Shutdown
from trinity_data.stage_inputs import StageInputs
from trinity_data.status import Status
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_explorer.bench.results import SetResult, results_of
from trinity_explorer.evaluator import build_evaluator
from trinity_explorer.workflows.pool import WorkflowPool

log = logging.getLogger(__name__)

FOLDER, RESULTS = "bench", "results.json"


@dataclass(frozen=True)
class BenchResults:
    """What the evaluations of a stage have found, those of earlier starts too."""

    stage: str
    folder: Path
    models: dict[int, str]
    """What was evaluated, by step."""
    sets: list[SetResult]

    def as_json(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "models": self.models,
            "interval": "95 %, Wilson's, with tasks as the sample",
            "results": [each.as_json() for each in self.sets],
        }


def bench(
    config: RunConfig, stage: StageConfig, *, quiet: bool = False, stop: Shutdown | None = None
) -> BenchResults:
    """Evaluates what is not on record yet; `results.json` in the folder has all of it.

    `config` was checked. Raises ConfigError where evaluations on record were made otherwise, and StoreError
    where a checkpoint is another than the one that was evaluated.
    """
    stop, config = stop or Shutdown(), config.model_copy(update={"stages": (stage,)})
    own = config.model_copy(update={"name": f"{config.name}/{FOLDER}/{stage.stage_name}"})
    own, status = new_name_if_not_continued(own), Status(run=f"{own.project}/{own.name}")
    with ExitStack() as stack:
        stack.enter_context(watch(status, quiet=quiet))
        folder = stack.enter_context(job_folder(own))
        stack.enter_context(LogFiles.of_job(folder, config.log).of_run())
        for note in (*config.notes, *notes_about_machine(config), *notes_about_code(config)):
            log.warning("%s", note)
        store = Store.create_or_open(folder / "store")
        stack.callback(store.close)
        take_configuration(own, store)
        write_configuration(config, folder)
        resources = RunInputs(config)
        only_newest = stage.explorer.bench_on_latest_checkpoint
        found = checkpoints_of(config.job_dir, resources.model_path, only_newest=only_newest)
        if checkpoints := _not_evaluated(found, store):
            inputs = open_inputs(config, [stage], resources)
            check_model([stage], inputs.model_path, inputs.tokenizer)
            status.begin_stage(
                stage.stage_name, first_step=checkpoints[0].step, last_step=checkpoints[-1].step
            )
            reporter = Reporter(
                stage, store, status, _monitor(config, folder, stack), detailed=config.monitor.detailed_stats
            )
            restarts = RestartLog(store, status, kind="engine")
            computing = stack.enter_context(computing_without_ranks(own, stage, inputs, restarts))
            if stop.installed:
                stop.install()  # Ray puts a handler of its own in place
            stop.run(_evaluate(checkpoints, stage, inputs, store, computing, reporter))
            store.seal()
        sets = results_of(store.table("evals", stage=stage.stage_name))
        steps = dict.fromkeys(each.step for each in sets)
        models = {step: _weights_on_record(store, step)["path"] for step in steps}
        results = BenchResults(stage.stage_name, folder, models, sets)
        replace_text(folder / RESULTS, json.dumps(results.as_json(), indent=1))
        log.info("done: %s", folder / RESULTS)
    return results


def _monitor(config: RunConfig, folder: Path, stack: ExitStack) -> Monitor:
    """An experiment of its own, whatever the run has."""
    (stage,) = config.stages
    monitor = build_monitor(
        config.monitor, project=config.project, name=config.name, stage=stage.stage_name, job_dir=folder
    )
    stack.callback(monitor.close)
    return monitor


def _not_evaluated(checkpoints: Sequence[Checkpoint], store: Store) -> list[Checkpoint]:
    """Raises StoreError for one that was evaluated and is another now."""
    evaluated = set(store.table("evals", columns=["step"])["step"].to_pylist())
    for checkpoint in checkpoints:
        if checkpoint.step not in evaluated:
            continue
        if _weights_on_record(store, checkpoint.step)["digest"] != checkpoint.digest():
            raise StoreError(
                f"{checkpoint.path} holds other weights than those of step {checkpoint.step} that were "
                f"evaluated in {store.root.parent}; to evaluate it anew, remove that folder, "
                "or give the stage another stage_name"
            )
    return [checkpoint for checkpoint in checkpoints if checkpoint.step not in evaluated]


async def _evaluate(
    checkpoints: Sequence[Checkpoint],
    stage: StageConfig,
    inputs: StageInputs,
    store: Store,
    computing: Compute,
    reporter: Reporter,
) -> None:
    """One after another, with engines that start once."""
    async with AsyncExitStack() as stack:
        stack.push_async_callback(computing.close)
        workflows = await stack.enter_async_context(WorkflowPool(process_settings(stage)))
        ask_for_defaults(workflows, stage, inputs.base_dir)
        engines, _ = await asyncio.gather(computing.engines(stage), workflows.start())
        # an engine starts with the model itself, which is step 0
        engines.rollout.model_version = 0
        runner = runner_of(stage, inputs, engines, workflow_finder(workflows, stage, inputs.base_dir))
        evaluator = build_evaluator(stage, inputs, runner, store=store, reporter=reporter, first_step=0)
        for checkpoint in checkpoints:
            if not checkpoint.is_there:
                message = f"{checkpoint.path} was removed before it was evaluated"
                log.warning("%s", message)
                event = store.log_event(stage.stage_name, checkpoint.step, "checkpoint_removed", message)
                await asyncio.wrap_future(event)
                continue
            record = {"digest": await asyncio.to_thread(checkpoint.digest), "path": checkpoint.path}
            begun = Commit(progress={evaluated_key(checkpoint.step): record})
            await asyncio.wrap_future(store.submit(begun))
            # an engine that is started again reads the weights again
            with ExitStack() as until_evaluated:
                if checkpoint.step:
                    context = checkpoint.weights(inputs.model_path, store.root.parent)
                    weights = await asyncio.to_thread(until_evaluated.enter_context, context)
                    await engines.rollout.load_weights(weights)
                reporter.status.step = reporter.status.engine_version = checkpoint.step
                await evaluator.evaluate(checkpoint.step)
            rows = store.table("evals", stage=stage.stage_name)
            of_step = pc.equal(rows["step"], pa.scalar(checkpoint.step))
            for result in results_of(rows.filter(of_step)):
                reporter.monitor.log(result.step, result.metrics())


def _weights_on_record(store: Store, step: int) -> dict[str, str]:
    """Of an evaluation that has begun: `digest` and `path`."""
    return dict(store.progress(evaluated_key(step)) or {})
