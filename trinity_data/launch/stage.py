"""One stage of a run: builds explorer and trainer and lets them run beside each other until it is done."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from trinity_data.config import StageConfig
from trinity_data.config.run import TRAINER
from trinity_data.errors import NothingLearntError
from trinity_data.launch.compute import NextStage, RunContext
from trinity_data.launch.copies import Copies
from trinity_data.launch.live_roles import show_trainer
from trinity_data.launch.peer import PUBLISHED, LedgerPeer, published_weights
from trinity_data.launch.stage_explorer import stage_explorer
from trinity_data.log_files import in_role
from trinity_data.monitor import Monitor
from trinity_data.progress import explored_key, stage_done_key, sync_key
from trinity_data.reporter import Reporter
from trinity_data.stage_inputs import num_steps
from trinity_data.store.backpressure import Backpressure
from trinity_data.store.protocol import WritableStore
from trinity_data.store.reader import pending_at_the_end
from trinity_data.store.types import Commit
from trinity_data.synchronizer import Synchronizer
from trinity_data.turns import Turns
from trinity_data.weights import HeldVersions, WeightFolders
from trinity_trainer.trainer import Trainer, build_trainer
from trinity_trainer.worker_group import WorkerGroup

log = logging.getLogger(__name__)

REJOIN_SECONDS = 120.0
"""That an explorer may take to join again, where the store and the trainer were lost after the last step."""


class StageRun:
    """One stage from `first_step` on."""

    def __init__(
        self,
        run: RunContext,
        stage: StageConfig,
        first_step: int,
        ranks: WorkerGroup,
        folders: WeightFolders | HeldVersions,
        next_stage: NextStage,
        monitor: Monitor,
    ) -> None:
        self.context, self.stage, self.name, self.first_step = run, stage, stage.stage_name, first_step
        self.ranks, self.next_stage, self.store = ranks, next_stage, run.store
        detailed = run.config.monitor.detailed_stats
        self.reporter = Reporter(stage, run.store, run.status, monitor, detailed=detailed)
        self.synchronizer = stage_synchronizer(
            stage, run.store, first_step, folders=folders if stage.is_live else None, peer=run.peer
        )

    async def run(self) -> int:
        """Runs or resumes the stage; returns its last step."""
        status, store, algorithm = self.context.status, self.store, self.stage.algorithm.algorithm_type
        status.begin_stage(
            self.name,
            first_step=self.first_step,
            last_step=step_number(self.first_step, num_steps(self.stage)),
        )
        show_trainer(status, self.ranks, self.synchronizer)
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
        resumed_from = await in_role(TRAINER, trainer.restore())
        if store.stage_ended_at(self.name) is not None:
            # explorers lack its last weights
            await self._train_part(trainer, resumed_from)
            await self._hand_over(trainer.last_step, rejoin_seconds=REJOIN_SECONDS)
            return trainer.last_step
        message = f"{algorithm} from step {resumed_from + 1}"
        store.log_event(self.name, resumed_from, "stage_started", message).result()
        if self.stage.is_live:
            await self._train_live(trainer, resumed_from)
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
        await self._hand_over(last)
        return last

    async def _hand_over(self, version: int, *, rejoin_seconds: float = 0.0) -> None:
        """The last weights, which go with the memory of this machine, to explorers on others. For
        `rejoin_seconds` also to those that are away.
        """
        peer, folders = self.context.peer, self.synchronizer.folders
        if (
            peer is None
            or folders is None
            or folders.method != "memory"
            or not self.context.computing.on_cluster
        ):
            return
        self.context.status.activity = "waiting until explorers have the last weights"
        seconds = self.stage.synchronizer.sync_timeout
        if not await peer.wait_loaded(version, seconds=seconds, rejoin_seconds=rejoin_seconds):
            log.warning("explorers take part that did not get version %d in %g seconds", version, seconds)

    async def _only_train(self, trainer: Trainer, resumed_from: int) -> None:
        last_step = step_number(self.first_step, trainer.specs.current.num_steps)
        self.context.status.last_step = last_step
        await in_role(TRAINER, trainer.replay(resumed_from))
        async with asyncio.TaskGroup() as tasks:
            start = self.next_stage.start_after(trainer.last_step + 1, self.synchronizer)
            starting = tasks.create_task(start)
            await in_role(TRAINER, trainer.train(last_step))
            starting.cancel()

    async def _train_live(self, trainer: Trainer, resumed_from: int) -> None:
        copies = Copies(self.stage, self.store, step=resumed_from)
        train = self._explore_and_train if self.stage.explores else self._train_part
        async with copies.written(self.context.stop):
            await train(trainer, resumed_from)
            self.context.status.activity = "copying experiences"

    async def _explore_and_train(self, trainer: Trainer, resumed_from: int) -> None:
        run, stage, synchronizer = self.context, self.stage, self.synchronizer
        last_step = step_number(self.first_step, num_steps(stage))
        if stage.shares_gpus:
            # engines take the memory that is free when they start
            await in_role(TRAINER, trainer.sleep())
        async with stage_explorer(run, stage, self.next_stage, synchronizer, self.reporter) as explorer:
            if stage.shares_gpus:
                await explorer.engines.sleep()
                synchronizer.turns = Turns({"explorer": explorer.engines, "trainer": trainer})
            explorer.engines.sender = trainer.sender
            await synchronizer.begin_turn("trainer")
            await in_role(TRAINER, trainer.replay(resumed_from))
            async with asyncio.TaskGroup() as both:
                prober = self.next_stage.prober(stage)
                exploring = explorer.explore(synchronizer.explored + 1, last_step, prober)
                both.create_task(in_role(stage.explorer.name, exploring))
                both.create_task(in_role(TRAINER, trainer.train(last_step)))
            if stage.explorer.eval_at_end:
                await trainer.publish(trainer.last_step)
                await synchronizer.end_turn("trainer")
                await in_role(stage.explorer.name, explorer.evaluate_end(trainer.last_step))
                await synchronizer.end_turn("explorer")
            # as the next stage finds them
            await synchronizer.begin_turn("trainer")

    async def _train_part(self, trainer: Trainer, resumed_from: int) -> None:
        """Trains what an explorer in another process makes."""
        assert self.context.peer is not None
        async with following(self.context.peer, self.synchronizer):
            await in_role(TRAINER, trainer.replay(resumed_from))
            last_step = step_number(self.first_step, num_steps(self.stage))
            await in_role(TRAINER, trainer.train(last_step))
            # that an explorer may evaluate at the end
            await trainer.publish(trainer.last_step)


def step_number(first_step: int, num_steps: int | None) -> int | None:
    """The last step of a stage of so many steps."""
    return None if num_steps is None else first_step + num_steps - 1


def stage_synchronizer(
    stage: StageConfig,
    store: WritableStore,
    first_step: int,
    *,
    folders: WeightFolders | HeldVersions | None = None,
    peer: LedgerPeer | None = None,
) -> Synchronizer:
    """From where an earlier session left the stage."""
    buffer = stage.buffer.trainer_input.experience_buffer
    limit = Backpressure(
        store, stage.stage_name, max_rollouts=buffer.capacity, max_bytes=buffer.capacity_bytes
    )
    synchronizer = Synchronizer(
        stage.synchronizer,
        first_step=first_step,
        explored=store.progress(explored_key(stage.stage_name)),
        limit=limit,
        folders=folders,
        peer=peer,
        max_staleness=stage.algorithm.sample_strategy_args.staleness_limit,
    )
    if peer is not None:
        reported = store.progress(sync_key(stage.stage_name, PUBLISHED))
        synchronizer.published = {weights.version: weights for weights in published_weights(reported)}
    return synchronizer


@asynccontextmanager
async def following(peer: LedgerPeer, synchronizer: Synchronizer) -> AsyncIterator[None]:
    """Hears what the other side tells, until the block ends."""
    async with asyncio.TaskGroup() as tasks:
        follow = tasks.create_task(peer.follow(synchronizer))
        yield
        follow.cancel()


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
