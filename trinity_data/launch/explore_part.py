"""An explorer of a run whose trainer, and other explorers, are processes of their own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from trinity_data.config import StageConfig
from trinity_data.config.run import SERVED
from trinity_data.launch.checkpoints import Checkpoint
from trinity_data.launch.compute import NextStage, RunContext
from trinity_data.launch.copies import Copies
from trinity_data.launch.peer import LOADED
from trinity_data.launch.stage import following, stage_synchronizer, step_number
from trinity_data.launch.stage_explorer import stage_explorer
from trinity_data.log_files import in_role
from trinity_data.monitor import Monitor
from trinity_data.progress import sync_key
from trinity_data.reporter import Reporter
from trinity_data.stage_inputs import num_steps
from trinity_data.synchronizer import Synchronizer
from trinity_data.weights import Weights
from trinity_explorer.explorer import Explorer
from trinity_explorer.steps import Shared, SharedSteps
from trinity_operators.shared_stream import SharedStream

log = logging.getLogger(__name__)

FIRST_STEP = 1
"""A run of two processes has one stage."""


class ExplorePart:
    """One stage, explored for a trainer elsewhere."""

    def __init__(self, run: RunContext, stage: StageConfig, next_stage: NextStage, monitor: Monitor) -> None:
        self.context, self.stage, self.next_stage, self.store = run, stage, next_stage, run.store
        detailed = run.config.monitor.detailed_stats
        self.reporter = Reporter(stage, run.store, run.status, monitor, detailed=detailed)
        assert run.peer is not None
        self.peer = run.peer
        self.synchronizer = stage_synchronizer(stage, run.store, FIRST_STEP, peer=self.peer)
        place = self.peer.store.place
        assert place is not None
        self.steps = SharedSteps(
            run.store,
            stage.stage_name,
            self.synchronizer,
            place,
            # sessions of agents are in the ledger
            tasksets={SERVED, *(taskset.name for taskset in stage.explored_tasksets)},
        )

    async def run(self) -> int:
        """Explores, or goes on exploring, the stage; returns its last explored step."""
        status, name, synchronizer = self.context.status, self.stage.stage_name, self.synchronizer
        last_step = step_number(FIRST_STEP, num_steps(self.stage))
        status.begin_stage(name, first_step=FIRST_STEP, last_step=last_step)
        before = synchronizer.explored
        log.info("stage %s: explores from step %d", name, before + 1)
        message = f"{self.stage.explorer.name} from step {before + 1}"
        await asyncio.wrap_future(self.store.log_event(name, before, "explorer_started", message))
        # the model that the run begins with is there before its trainer is
        base = Weights(FIRST_STEP - 1, self.context.inputs.model_path)
        synchronizer.published.setdefault(base.version, base)
        if self.store.progress(sync_key(name, f"{LOADED}/{self.stage.explorer.name}")) is None:
            # until it has loaded others, weights that it may load are kept
            await self.peer.tell_loaded(base.version)
        self.peer.other_explorers = self._hear_others
        shared = Shared(self.steps, self.peer.lease("evaluation"))
        copies = Copies(self.stage, self.store, step=before)
        async with (
            copies.written(self.context.stop),
            following(self.peer, synchronizer),
            stage_explorer(
                self.context, self.stage, self.next_stage, synchronizer, self.reporter, shared
            ) as explorer,
        ):
            role = self.stage.explorer.name
            exploring = explorer.explore(before + 1, last_step, self.next_stage.prober(self.stage))
            await in_role(role, exploring)
            await in_role(role, self._evaluate_end(explorer, synchronizer))
        message = f"{self.stage.explorer.name} after step {synchronizer.explored}"
        await asyncio.wrap_future(
            self.store.log_event(name, synchronizer.explored, "explorer_finished", message)
        )
        return synchronizer.explored

    def _hear_others(self, reported: Mapping[str, Any]) -> None:
        self.steps.hear(reported)
        for name, stream in self.next_stage.streams(self.stage).items():
            if isinstance(stream, SharedStream):
                stream.read_to(self.steps.num_taken.get(name, 0))

    async def _evaluate_end(self, explorer: Explorer, synchronizer: Synchronizer) -> None:
        """Once the trainer has ended, with its last weights."""
        evaluator, job_dir = explorer.evaluator, self.context.config.job_dir
        if not (self.stage.explorer.eval_at_end and evaluator.eval_sets):
            return
        self.context.status.activity = "waiting for the trainer to end"
        last_step = await synchronizer.wait_ended()
        if not await evaluator.evaluates() or evaluator.has_evaluated(last_step):
            return
        with ExitStack() as stack:
            saved = Checkpoint.of_step(job_dir, last_step)
            if synchronizer.newest_version < last_step and saved.is_there:
                # they have gone with the trainer's memory
                context = saved.weights(self.context.inputs.model_path, job_dir)
                weights = await asyncio.to_thread(stack.enter_context, context)
                synchronizer.published.setdefault(last_step, weights)
            await synchronizer.wait_last_weights(last_step)
            await explorer.evaluate_end(last_step)
