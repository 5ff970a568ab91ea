"""One stage of a run: builds what the stage needs and lets explorer and trainer run side
by side until it is done.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from trinity_data.config import ExperienceBufferConfig, RunConfig, StageConfig, TasksetConfig
from trinity_data.dataset.reader import Source
from trinity_data.errors import NothingLearntError
from trinity_data.launch.compute import Compute
from trinity_data.launch.configuration import Configurations
from trinity_data.launch.copies import Copies
from trinity_data.launch.inputs import RunInputs
from trinity_data.launch.live_view import step_line
from trinity_data.launch.pipelines import experience_operators
from trinity_data.launch.sampler import batches_of, replays
from trinity_data.launch.workflows import ask_for_defaults, process_settings, workflow_finder
from trinity_data.monitor import Monitor
from trinity_data.probe import TokenSequences, probe_sequences
from trinity_data.progress import explored_key, stage_done_key
from trinity_data.schema import rows_to_table
from trinity_data.shutdown import Shutdown
from trinity_data.status import Status
from trinity_data.store.backpressure import Backpressure
from trinity_data.store.reader import pending_at_the_end
from trinity_data.store.store import Store
from trinity_data.store.types import Commit, State
from trinity_data.synchronizer import Synchronizer, SyncSchedule
from trinity_data.tokenizer import ChatTemplate
from trinity_data.weights import WeightFolders, Weights
from trinity_explorer.engines.engine import Sampling
from trinity_explorer.engines.pool import EnginePool
from trinity_explorer.evaluator import EvalSet, Evaluator
from trinity_explorer.explorer import Explorer, explore_settings, sampling_of
from trinity_explorer.rollout import Limits
from trinity_explorer.task_sampler import TaskSampler
from trinity_explorer.workflows.pool import WorkflowPool
from trinity_operators.registry import build_operators
from trinity_operators.task_filtering import read_for_evaluation
from trinity_operators.task_pipeline import StreamSpec, TaskStream
from trinity_trainer.datasets import build_dataset
from trinity_trainer.offline_sampler import OfflineDataset, OfflineSampler
from trinity_trainer.stage_spec import StageSpec
from trinity_trainer.trainer import BatchSampler, Trainer, TrainSettings
from trinity_trainer.worker_group import WorkerGroup

log = logging.getLogger(__name__)

# tasks read ahead of the explorer, in steps
WINDOW_STEPS = 4


@dataclass(frozen=True)
class RunContext:
    """What all stages of a run share."""

    config: RunConfig
    resources: RunInputs
    job_dir: Path
    store: Store
    status: Status
    computing: Compute
    configurations: Configurations
    stop: Shutdown


def task_stream(
    stage: StageConfig, config: RunConfig, resources: RunInputs, store: Store, status: Status
) -> TaskStream:
    """The stage's task set on its way through the task operators; reads nothing before it is started."""
    taskset = stage.buffer.explorer_input.taskset
    assert taskset is not None
    spec = StreamSpec(
        taskset=taskset,
        source=resources.source(taskset),
        pipeline=stage.data_processor.task_pipeline,
        base_dir=config.file.parent,
        stage=stage.stage_name,
        seed=config.seed,
    )
    return TaskStream(spec, store, window=WINDOW_STEPS * stage.buffer.batch_size, status=status)


class NextStage:
    """Starts engines and stream of the next exploring stage while something else goes
    on: both take seconds.
    """

    def __init__(self, place: RunContext) -> None:
        self.place = place
        self.streams: dict[str, TaskStream] = {}

    def start(self) -> None:
        """Does nothing when no stage is left that explores, or when it was started."""
        place = self.place
        open_stages = (
            stage
            for stage in place.config.stages
            if place.store.progress(stage_done_key(stage.stage_name)) is None
        )
        stage = next((stage for stage in open_stages if stage.mode == "both"), None)
        if stage is not None:
            place.computing.start_engines(stage)
            self.stream(stage).start()

    def stream(self, stage: StageConfig) -> TaskStream:
        """The stage's, started or not."""
        if stage.stage_name not in self.streams:
            place = self.place
            self.streams[stage.stage_name] = task_stream(
                stage, place.config, place.resources, place.store, place.status
            )
        return self.streams[stage.stage_name]

    async def close(self) -> None:
        for stream in self.streams.values():
            await stream.close()


def num_steps(stage: StageConfig) -> int | None:
    """Of the whole stage, where the file counts in steps."""
    return stage.trainer.total_steps or stage.buffer.total_steps


class StageRun:
    """One stage from `first_step` on."""

    def __init__(
        self,
        place: RunContext,
        stage: StageConfig,
        first_step: int,
        ranks: WorkerGroup,
        folders: WeightFolders,
        ahead: NextStage,
        monitor: Monitor,
    ) -> None:
        self.place, self.stage, self.first_step = place, stage, first_step
        self.ranks, self.folders, self.ahead, self.monitor = ranks, folders, ahead, monitor
        self.name = stage.stage_name
        self.num_steps, self._num_units = num_steps(stage), 0
        self.explores = stage.mode == "both"
        base_dir = place.config.file.parent
        self.workflows = WorkflowPool(process_settings(stage))
        self.workflow_for = workflow_finder(self.workflows, stage, base_dir)

    @property
    def last_step(self) -> int | None:
        return None if self.num_steps is None else self.first_step + self.num_steps - 1

    async def run(self) -> int:
        """Runs or resumes the stage; returns its last step."""
        place = self.place
        place.status.begin_stage(self.name, first_step=self.first_step, last_step=self.last_step)
        log.info("stage %s: %s from step %d", self.name, self.stage.algorithm.algorithm_type, self.first_step)
        data = None if self.explores else await asyncio.to_thread(self._offline_batches)
        if data is not None:
            # before the trainer is told, because its schedule may be a share of all steps
            self._num_units = data.data.num_units
            self.num_steps = self._scheduled_steps(self.stage)
            place.status.last_step = self.last_step
        resumed_from = await self._restore_trainer()
        self._record(
            "stage_started",
            resumed_from,
            f"{self.stage.algorithm.algorithm_type} from step {resumed_from + 1}",
        )
        last = await (self._explore(resumed_from) if data is None else self._only_train(data, resumed_from))
        refuse_an_untrained_stage(place.store, self.name, place.job_dir)
        if (waiting := pending_at_the_end(place.store, self.name, ended_at=last)) is not None:
            log.warning("%s", waiting)
            self._record("rollouts_wait", last, str(waiting))
        self._record("stage_finished", last, f"after {last - self.first_step + 1} steps", done=True)
        return last

    def _rows_of(self, step: int) -> dict[str, float]:
        """Of a stage that only trains: rows of the data that the step read,
        and those that are not trained.
        """
        states = [state for _, state in self.place.store.group_progress(self.name, step)]
        return {
            "rows/number": float(len(states)),
            "rows/dropped": float(states.count(State.DROPPED)),
        }

    def _record(self, kind: str, step: int, message: str, *, done: bool = False) -> None:
        """A row of `events`, and with it that the stage is done."""
        row: dict[str, object] = {
            "at": datetime.now(UTC),
            "stage": self.name,
            "step": step,
            "kind": kind,
            "message": message,
        }
        progress = {stage_done_key(self.name): step} if done else {}
        self.place.store.commit(Commit(tables={"events": rows_to_table("events", [row])}, progress=progress))

    async def _restore_trainer(self) -> int:
        """Weights and optimiser of the newest checkpoint; returns the step they stand for."""
        place, ranks = self.place, self.ranks
        self._spec = await asyncio.to_thread(self._spec_of, self.stage)
        await ranks.start_stage(self._spec, reference_path=place.resources.model_path)
        checkpoint = place.store.latest_checkpoint()
        if checkpoint is None:
            return self.first_step - 1
        await ranks.load(place.job_dir / checkpoint.path, with_optimizer=checkpoint.step >= self.first_step)
        return checkpoint.step

    def _spec_of(self, stage: StageConfig) -> StageSpec:
        """What a configuration of this stage asks of the ranks."""
        before = self.place.job_dir / f"global_step_{self.first_step - 1}"
        return StageSpec(
            stage.algorithm,
            stage.trainer,
            self._scheduled_steps(stage),
            stage.model.max_response_tokens,
            reference_checkpoint=str(before) if self.first_step > 1 else None,
        )

    def _scheduled_steps(self, stage: StageConfig) -> int | None:
        """All steps of a configuration of this stage.

        None where it counts by tasks and no schedule asks for them.
        """
        buffer, optimizer = stage.buffer, stage.algorithm.optimizer
        if (given := num_steps(stage)) is not None:
            return given
        if not self.explores:
            return max(1, self._num_units * buffer.total_epochs // buffer.train_batch_size)
        if optimizer.lr_scheduler_type == "constant" and not optimizer.lr_warmup_steps_ratio:
            return None
        return math.ceil(self._num_task_rows * buffer.total_epochs / buffer.batch_size)

    @cached_property
    def _num_task_rows(self) -> int:
        taskset = self.stage.buffer.explorer_input.taskset
        assert taskset is not None
        return Source(self.place.resources.source(taskset)).num_rows

    async def _take_settings(self, step: int) -> None:
        """A step that is trained again is trained as it was, whatever the pipeline file has become since."""
        spec = self._spec_of(self.place.configurations.stage_at(self.name, step) or self.stage)
        if spec != self._spec:
            await self.ranks.change_settings(spec, reference_path=self.place.resources.model_path)
            self._spec = spec

    async def _only_train(self, batches: OfflineSampler, resumed_from: int) -> int:
        trainer = self._trainer(
            batches,
            on_trained=self._trained_offline,
            publishes_version=lambda step: False,
            extra_metrics=self._rows_of,
        )
        await trainer.replay(resumed_from)
        await trainer.train(self.last_step)
        return trainer.last_step

    async def _trained_offline(self, step: int) -> None:
        # not earlier, because the first step has the cores for itself until then
        self.ahead.start()

    def _offline_batches(self) -> OfflineSampler:
        place = self.place
        data = self._rows_at_rest(self.stage.buffer.trainer_input.experience_buffer, "experience_buffer")
        return OfflineSampler(
            place.store,
            data,
            stage=self.name,
            first_step=self.first_step,
            batch_size=self.stage.buffer.train_batch_size,
            seed=place.config.seed,
        )

    def _rows_at_rest(self, buffer: ExperienceBufferConfig, key: str) -> OfflineDataset:
        place = self.place
        needs_no_source = buffer.storage_type == "store" or buffer.holds_copied_rows
        return build_dataset(
            buffer,
            None if needs_no_source else Source(place.resources.source(buffer)),
            place.computing.tokenizer,
            self.stage.model,
            key=f"buffer.trainer_input.{key}",
            folder=place.job_dir / "buffer",
        )

    async def _explore(self, resumed_from: int) -> int:
        copies = Copies(
            self.stage,
            self.place.store,
            self.place.job_dir,
            on_failure=lambda said: self._record("copy_failed", resumed_from, said),
        )
        try:
            async with self.workflows:
                ask_for_defaults(self.workflows, self.stage, self.place.config.file.parent)
                last = await self._explore_and_train(resumed_from)
        except asyncio.CancelledError:
            await copies.write_when_stopped(self.place.stop)
            raise
        self.place.status.activity = "copying experiences"
        await copies.write()
        return last

    async def _explore_and_train(self, resumed_from: int) -> int:
        place, stage, sync = self.place, self.stage, self.stage.synchronizer
        explored = int(place.store.progress(explored_key(self.name)) or self.first_step - 1)
        rule = SyncSchedule(self.first_step, sync.sync_interval, sync.sync_offset)
        pace = Synchronizer(
            rule,
            trained=resumed_from,
            explored=explored,
            excess=self._capacity().excess,
            timeout=sync.sync_timeout,
        )
        stream = self.ahead.stream(stage)
        stream.start()
        # processes of workflows take seconds to start, as engines do
        engines, _ = await asyncio.gather(place.computing.engines(stage), self.workflows.start())
        batches = await asyncio.to_thread(
            batches_of,
            stage,
            place.store,
            pace,
            rows_at_rest=self._rows_at_rest,
            first_step=self.first_step,
            seed=place.config.seed,
        )
        evaluator = self._evaluator(engines)
        explorer = self._explorer(
            engines, stream, evaluator, pace, weights_of=lambda version: trainer.weights_of(version)
        )
        trainer = self._trainer(
            batches,
            on_trained=pace.finished_training,
            publishes_version=rule.publishes_version,
            extra_metrics=explorer.step_metrics,
            probe=self._probe(engines),
        )
        await trainer.replay(resumed_from, publish_from=rule.needs(explored + 1))
        await pace.finished_training(trainer.last_step)
        await self._side_by_side(explorer, trainer, explored, stream)
        if stage.explorer.eval_at_end:
            await explorer.load(await trainer.publish(trainer.last_step))
            await evaluator.evaluate(trainer.last_step)
        return trainer.last_step

    def _probe(self, engines: EnginePool) -> TokenSequences:
        if engines.name == "fake":
            return ()
        return probe_sequences(self.place.computing.tokenizer, max_model_len=self.stage.model.max_model_len)

    def _capacity(self) -> Backpressure:
        buffer = self.stage.buffer.trainer_input.experience_buffer
        return Backpressure(
            self.place.store, self.name, max_rollouts=buffer.capacity, max_bytes=buffer.capacity_bytes
        )

    async def _side_by_side(
        self, explorer: Explorer, trainer: Trainer, explored: int, stream: TaskStream
    ) -> None:
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(explorer.explore(explored + 1, self.last_step))
                both.create_task(trainer.train(self.last_step))
        finally:
            await stream.close()

    def _explorer(
        self,
        engines: EnginePool,
        stream: TaskStream,
        evaluator: Evaluator,
        pace: Synchronizer,
        weights_of: Callable[[int], Weights],
    ) -> Explorer:
        place, stage = self.place, self.stage
        epochs = None if self.num_steps is not None else stage.buffer.total_epochs
        return Explorer(
            explore_settings(stage, place.config.seed),
            store=place.store,
            engines=engines,
            template=self._template(),
            tasks=TaskSampler(
                stream, num_epochs=epochs, seed=place.config.seed, shuffle=stream.spec.taskset.shuffle
            ),
            operators=experience_operators(stage, place.config.file.parent),
            workflow_for=self.workflow_for,
            evaluator=evaluator,
            pace=pace,
            weights_of=weights_of,
            folders=self.folders,
            status=place.status,
        )

    def _evaluator(self, engines: EnginePool) -> Evaluator:
        place, explorer = self.place, self.stage.explorer
        return Evaluator(
            [self._eval_set(taskset) for taskset in self.stage.buffer.explorer_input.eval_tasksets],
            stage=self.name,
            store=place.store,
            engines=engines,
            template=self._template(),
            workflow_for=self.workflow_for,
            limits=Limits(explorer.max_timeout, explorer.max_retry_times),
            first_step=self.first_step,
            interval=explorer.eval_interval,
            on_startup=explorer.eval_on_startup,
            on_result=self._report_evaluation,
            status=place.status,
        )

    def _eval_set(self, taskset: TasksetConfig) -> EvalSet:
        operators = build_operators(
            self.stage.data_processor.task_pipeline.operators, self.place.config.file.parent
        )
        source = Source(self.place.resources.source(taskset))
        tasks, left_out = read_for_evaluation(taskset, source, operators, stage=self.name)
        if left_out:
            said = (
                f"{len(left_out)} of {source.num_rows} rows of {taskset.name!r} cannot be tried: "
                f"{left_out[0]}"
            )
            log.warning("stage %s, evaluation: %s", self.name, said)
            self._record("left_out", self.first_step, said)
        sampling: Sampling = sampling_of(taskset.rollout_args, self.stage.model)
        return EvalSet(taskset.name, tasks, sampling, taskset.repeat_times)

    def _report_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.monitor.log(step, metrics)
        for name, value in metrics.items():
            if name.endswith("/accuracy"):
                self.place.status.accuracy[name.split("/")[1]] = value
        shown = ", ".join(f"{name.removeprefix('eval/')} {value:.3f}" for name, value in metrics.items())
        log.info("stage %s, evaluation at step %d: %s", self.name, step, shown)

    def _template(self) -> ChatTemplate:
        model = self.stage.model
        return ChatTemplate(
            self.place.computing.tokenizer,
            model.custom_chat_template,
            max_prompt_tokens=model.max_prompt_tokens,
            truncate=model.enable_prompt_truncation,
        )

    def _trainer(
        self,
        batches: BatchSampler,
        *,
        on_trained: Callable[[int], Any],
        publishes_version: Callable[[int], bool],
        extra_metrics: Callable[[int], Mapping[str, float]],
        probe: TokenSequences = (),
    ) -> Trainer:
        place, config = self.place, self.stage.trainer
        settings = TrainSettings(
            stage=self.name,
            first_step=self.first_step,
            save_interval=config.save_interval,
            save_huggingface=config.save_hf_checkpoint,
            max_checkpoints=config.max_checkpoints_to_keep,
            max_skipped_updates=config.max_skipped_updates,
            replay=replays(self.stage),
            stop_timeout=config.stop_timeout,
            probe=probe,
            configuration=place.configurations.current,
        )
        return Trainer(
            settings,
            store=place.store,
            ranks=self.ranks,
            batches=batches,
            folders=self.folders,
            job_dir=place.job_dir,
            on_trained=on_trained,
            publishes_version=publishes_version,
            extra_metrics=extra_metrics,
            on_metrics=self._report_step,
            status=place.status,
            before_step=self._take_settings,
            stop=place.stop,
        )

    def _report_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.monitor.log(
            step, {name if "/" in name else f"actor/{name}": value for name, value in metrics.items()}
        )
        log.info("stage %s, step %d: %s", self.name, step, step_line(metrics))


def refuse_an_untrained_stage(store: Store, stage: str, job_dir: Path) -> None:
    """Raises NothingLearntError where no step of the stage had anything to train, however few there were."""
    losses = store.table("steps", columns=["loss"], stage=stage)["loss"]
    if len(losses) and losses.null_count == len(losses):
        raise NothingLearntError(
            f"stage {stage}: none of its {len(losses)} steps had anything to train, "
            f"so that the model is as it was; `trinity-data audit {job_dir}` says what became of the rows"
        )
