"""One stage of a run: builds explorer and trainer and lets them run beside each other until it is done."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from trinity_data.config import StageConfig
from trinity_data.errors import NothingLearntError
from trinity_data.launch.compute import NextStage, RunContext, runner_of
from trinity_data.launch.copies import Copies
from trinity_data.launch.pipelines import configured_and_chain
from trinity_data.launch.workflows import ask_for_defaults, process_settings, workflow_finder
from trinity_data.monitor import Monitor
from trinity_data.progress import explored_key, stage_done_key
from trinity_data.reporter import Reporter
from trinity_data.stage_inputs import num_steps
from trinity_data.store.backpressure import Backpressure
from trinity_data.store.protocol import WritableStore
from trinity_data.store.reader import pending_at_the_end
from trinity_data.store.types import Commit
from trinity_data.synchronizer import Synchronizer
from trinity_data.weights import WeightFolders
from trinity_explorer.explorer import build_explorer
from trinity_explorer.workflows.pool import WorkflowPool
from trinity_operators.experience_workers import declared_workers, with_workers
from trinity_operators.remote_operators import OwnWorkers
from trinity_trainer.trainer import Trainer, build_trainer
from trinity_trainer.worker_group import WorkerGroup

log = logging.getLogger(__name__)


class StageRun:
    """One stage from `first_step` on."""

    def __init__(
        self,
        run: RunContext,
        stage: StageConfig,
        first_step: int,
        ranks: WorkerGroup,
        folders: WeightFolders,
        next_stage: NextStage,
        monitor: Monitor,
    ) -> None:
        self.context, self.stage, self.name, self.first_step = run, stage, stage.stage_name, first_step
        self.ranks, self.next_stage, self.store = ranks, next_stage, run.store
        self.reporter = Reporter(stage, run.store, run.status, monitor)
        buffer = stage.buffer.trainer_input.experience_buffer
        self.synchronizer = Synchronizer(
            stage.synchronizer,
            first_step=first_step,
            explored=run.store.progress(explored_key(self.name)),
            limit=Backpressure(
                run.store, self.name, max_rollouts=buffer.capacity, max_bytes=buffer.capacity_bytes
            ),
            folders=folders if stage.is_live else None,
        )

    async def run(self) -> int:
        """Runs or resumes the stage; returns its last step."""
        status, store, algorithm = self.context.status, self.store, self.stage.algorithm.algorithm_type
        status.begin_stage(
            self.name, first_step=self.first_step, last_step=self._step_number(num_steps(self.stage))
        )
        log.info("stage %s: %s from step %d", self.name, algorithm, self.first_step)
        trainer = await asyncio.to_thread(
            build_trainer,
            self.stage,
            self.context.inputs,
            store=store,
            ranks=self.ranks,
            synchronizer=self.synchronizer,
            reporter=self.reporter,
            history=self.context.configurations,
            stop=self.context.stop,
        )
        resumed_from = await trainer.restore()
        message = f"{algorithm} from step {resumed_from + 1}"
        store.log_event(self.name, resumed_from, "stage_started", message).result()
        if self.stage.explores:
            await self._explore(trainer, resumed_from)
        else:
            await self._only_train(trainer, resumed_from)
        last = trainer.last_step
        refuse_an_untrained_stage(store, self.name)
        if (pending := pending_at_the_end(store, self.name, ended_at=last)) is not None:
            log.warning("%s", pending)
            store.log_event(self.name, last, "rollouts_wait", str(pending)).result()
        message = f"after {last - self.first_step + 1} steps"
        done = Commit(progress={stage_done_key(self.name): last})
        store.log_event(self.name, last, "stage_finished", message, commit=done).result()
        return last

    def _step_number(self, num_steps: int | None) -> int | None:
        """The last step of a stage of so many steps."""
        return None if num_steps is None else self.first_step + num_steps - 1

    async def _only_train(self, trainer: Trainer, resumed_from: int) -> None:
        self.context.status.last_step = last_step = self._step_number(trainer.specs.current.num_steps)
        await trainer.replay(resumed_from)
        async with asyncio.TaskGroup() as tasks:
            start = self.next_stage.start_after(trainer.last_step + 1, self.synchronizer)
            starting = tasks.create_task(start)
            await trainer.train(last_step)
            starting.cancel()

    async def _explore(self, trainer: Trainer, resumed_from: int) -> None:
        copies = Copies(self.stage, self.store, step=resumed_from)
        try:
            await self._explore_and_train(trainer, resumed_from)
        except asyncio.CancelledError:
            await copies.write_when_stopped(self.context.stop)
            raise
        self.context.status.activity = "copying experiences"
        await copies.write()

    def _workers_of_the_next_stage(self) -> list[OwnWorkers]:
        """That its experience operators are to have; none where it only trains, which may need their GPUs."""
        stages, base_dir = self.context.config.stages, self.context.inputs.base_dir
        following = stages[stages.index(self.stage) + 1 :]
        if not following or not following[0].explores:
            return []
        configured, chain = configured_and_chain(following[0], base_dir)
        return declared_workers(chain, configured, following[0].data_processor.experience_pipeline, base_dir)

    async def _explore_and_train(self, trainer: Trainer, resumed_from: int) -> None:
        run, stage, synchronizer = self.context, self.stage, self.synchronizer
        last_step, base_dir = self._step_number(num_steps(stage)), run.inputs.base_dir
        async with WorkflowPool(process_settings(stage)) as workflows:
            ask_for_defaults(workflows, stage, base_dir)
            streams = self.next_stage.streams(stage)
            for stream in streams.values():
                stream.start()
            # processes of workflows take seconds to start, as engines do
            engines, _ = await asyncio.gather(run.computing.engines(stage), workflows.start())
            configured, chain = configured_and_chain(stage, base_dir)
            explorer = build_explorer(
                stage,
                run.inputs,
                streams,
                store=self.store,
                runner=runner_of(stage, run.inputs, engines, workflow_finder(workflows, stage, base_dir)),
                operators=with_workers(
                    chain,
                    configured,
                    stage.data_processor.experience_pipeline,
                    base_dir,
                    kept=run.kept_workers,
                    later=self._workers_of_the_next_stage(),
                ),
                synchronizer=synchronizer,
                reporter=self.reporter,
            )
            prober = self.next_stage.prober(stage)
            await trainer.replay(resumed_from)
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(explorer.explore(synchronizer.explored + 1, last_step, prober))
                    both.create_task(trainer.train(last_step))
            finally:
                await self.next_stage.close_streams(stage)
            if stage.explorer.eval_at_end:
                await trainer.publish(trainer.last_step)
                await explorer.evaluate_end(trainer.last_step)


def refuse_an_untrained_stage(store: WritableStore, stage: str) -> None:
    """Raises NothingLearntError where no step of the stage had anything to train, however few there were."""
    losses = store.table("steps", columns=["loss"], stage=stage)["loss"]
    if losses.null_count < len(losses):
        return
    reason = f"none of its {len(losses)} steps had anything to train" if len(losses) else "it trained no step"
    droppers = store.table("tasks", columns=["dropped_by"], stage=stage)["dropped_by"]
    counts = Counter(name for name in droppers.to_pylist() if name)
    if counts and counts.total() == len(droppers):
        shares = ", ".join(f"{number} by {operator}" for operator, number in counts.most_common())
        reason += f" (all of its {len(droppers)} tasks were dropped: {shares})"
    raise NothingLearntError(
        f"stage {stage}: {reason}, so that the model is as it was; "
        f"`trinity-data audit {store.root.parent}` says what became of the rows"
    )
