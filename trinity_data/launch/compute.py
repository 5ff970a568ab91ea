"""Trainer ranks and engines of a run: kept from stage to stage where the next one needs the
same, else started anew.

Nothing is asked of a Ray of this machine alone that its GPUs cannot give: Ray would wait for them silently.
On a cluster room is waited for, for a while.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from trinity_data.config import (
    AuxiliaryModelConfig,
    EngineConfig,
    RolloutModelConfig,
    RunConfig,
    StageConfig,
    TasksetConfig,
    engines_of,
)
from trinity_data.dataset.task import Task
from trinity_data.dataset.task_queue import queue_folder
from trinity_data.errors import ConfigError, WorkerDiedError
from trinity_data.launch.configuration import Configurations
from trinity_data.launch.peer import LedgerPeer
from trinity_data.launch.task_output import output_taskset, write_output
from trinity_data.launch.task_probes import build_prober
from trinity_data.log_files import LogFiles
from trinity_data.restart_log import RestartLog
from trinity_data.shutdown import Shutdown
from trinity_data.stage_inputs import ModelFiles, StageInputs
from trinity_data.status import Status
from trinity_data.store.protocol import WritableStore
from trinity_data.synchronizer import Synchronizer
from trinity_data.tokenizer import ChatTemplate
from trinity_explorer.engine_model import EngineModel
from trinity_explorer.engines.pool import EnginePool, build_engines
from trinity_explorer.rollout import RolloutRunner, build_runner
from trinity_explorer.task_prober import TaskProber
from trinity_explorer.workflows.workflow import Workflow
from trinity_operators.experience_workers import KeptWorkers
from trinity_operators.queue_stream import QueueSpec, QueueStream
from trinity_operators.shared_stream import SharedStream, Stream
from trinity_operators.stage_arguments import resolved_pipeline
from trinity_operators.task_chunks import StreamSpec
from trinity_operators.task_pipeline import TaskStream
from trinity_trainer.worker_group import WorkerGroup, start_trainer

# a machine's GPUs are not for a stage with `gpu_per_node: 0`
NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}
# tasks read ahead of the explorer, in steps
WINDOW_STEPS = 4
# of a set that is chosen from, which is read to its end before the first step
WHOLE_SET = sys.maxsize


@dataclass(frozen=True)
class EngineShape:
    """What a stage asks of its engines; another one asks for other processes."""

    rollout_model: RolloutModelConfig
    auxiliary_models: tuple[AuxiliaryModelConfig, ...]
    max_model_len: int
    env: tuple[tuple[str, str], ...]
    num_gpus: int
    """Of all of them."""
    shares_gpus: bool
    """With the ranks."""
    receives_weights: bool
    """From the ranks, without files."""


def engine_shape(stage: StageConfig) -> EngineShape:
    """That of an exploring stage."""
    explorer = stage.explorer
    num_gpus = sum(engine.num_gpus for _, engine in engines_of(explorer)) if stage.cluster.num_gpus else 0
    env = tuple(sorted(explorer.env_vars.items()))
    return EngineShape(
        explorer.rollout_model,
        explorer.auxiliary_models,
        stage.model.max_model_len,
        env,
        num_gpus,
        stage.shares_gpus,
        stage.sends_weights,
    )


@dataclass(frozen=True)
class StageEngines:
    """The engines of a stage."""

    rollout: EnginePool
    auxiliary: Mapping[str, EnginePool]
    """By the names of the auxiliary models."""

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in (self.rollout, *self.auxiliary.values())))


def runner_of(
    stage: StageConfig, inputs: StageInputs, engines: StageEngines, workflow_for: Callable[[Task], Workflow]
) -> RolloutRunner:
    """Runs rollouts of the stage's tasks with its engines; to be called in their loop."""
    auxiliary_models = {
        model.name: EngineModel(
            engines.auxiliary[model.name],
            ChatTemplate(inputs.auxiliary_models[model.model_path].tokenizer, model.chat_template),
        )
        for model in stage.explorer.auxiliary_models
    }
    return build_runner(stage, inputs, engines.rollout, workflow_for, auxiliary_models)


def gpus_needed(stage: StageConfig) -> int:
    """Of ranks and engines together."""
    if not stage.cluster.num_gpus:
        return 0
    of_ranks = stage.trainer.world_size if stage.trains else 0
    of_engines = engine_shape(stage).num_gpus if stage.has_engines else 0
    return max(of_ranks, of_engines) if stage.shares_gpus else of_ranks + of_engines


def check_gpus(stages: Sequence[StageConfig], num_gpus: int) -> None:
    """Raises a ConfigError when a stage needs more GPUs than there are."""
    for stage in stages:
        needed = gpus_needed(stage)
        if needed > num_gpus:
            raise ConfigError(
                f"stage {stage.stage_name!r} asks for {needed} GPU(s): {' and '.join(_gpu_users(stage))}; "
                f"there are {num_gpus}; ask for fewer, "
                "or set cluster.gpu_per_node=0"
            )


def _gpu_users(stage: StageConfig) -> Iterator[str]:
    if stage.trains:
        yield f"trainer.world_size {stage.trainer.world_size}"
    if stage.has_engines:
        yield f"{engine_shape(stage).num_gpus} for engines"


class Compute:
    """Asked by one stage after the other."""

    def __init__(
        self,
        *,
        num_gpus: int,
        machine_has_gpus: bool,
        env: Mapping[str, str],
        restarts: RestartLog,
        on_cluster: bool = False,
        logs: LogFiles | None = None,
        model_path: str = "",
        tokenizer: Any = None,
    ) -> None:
        """`restarts` is of the engines. `on_cluster`: others may use the Ray too, and room may come.
        `model_path`, `tokenizer` and `auxiliary_models`, by their paths in the file, may come later, but
        before more than `start_ranks` is asked for.
        """
        self.num_gpus, self.machine_has_gpus, self.env = num_gpus, machine_has_gpus, dict(env)
        self.restarts, self.logs, self.on_cluster = restarts, logs, on_cluster
        self.model_path, self.tokenizer = model_path, tokenizer
        self.auxiliary_models: Mapping[str, ModelFiles] = {}
        self._ranks: WorkerGroup | None = None
        self._ranks_shape = (0, False, False)
        self._are_loaded = False
        self._engines: asyncio.Task[StageEngines] | None = None
        self._engine_shape: EngineShape | None = None

    def start_ranks(self, stage: StageConfig) -> None:
        """Starts as many as the stage needs, unless they run already; does not wait for them."""
        shape = (stage.trainer.world_size, bool(stage.cluster.num_gpus), stage.shares_gpus)
        if self._ranks is not None and self._ranks_shape == shape:
            return
        if self._ranks is not None:
            self._ranks.kill()
        self._ranks = start_trainer(
            world_size=shape[0],
            num_gpus=stage.cluster.num_gpus,
            shares_gpus=stage.shares_gpus,
            env=self._environment(stage),
            max_restarts=stage.cluster.max_restarts,
            max_seconds_for_room=self._max_seconds_for_room(stage),
            logs=self.logs,
        )
        self._ranks_shape, self._are_loaded = shape, False

    async def ranks(self, stage: StageConfig) -> WorkerGroup:
        """Those of the stage, with the run's model; engines that leave no room for them are closed first."""
        if (shape := self._engine_shape) is not None:
            fit_beside = not shape.num_gpus or shape.num_gpus + gpus_needed(stage) <= self.num_gpus
            if not (shape == engine_shape(stage) if stage.has_engines else fit_beside):
                await self.close_engines()
        self.start_ranks(stage)
        assert self._ranks is not None
        if not self._are_loaded:
            # where one dies meanwhile, the trainer of the stage starts them again
            with suppress(WorkerDiedError):
                await self._ranks.load_model(self.model_path)
            self._are_loaded = True
        return self._ranks

    def start_engines(self, stage: StageConfig) -> None:
        """Begins to start those of a stage to come, where there is room for them beside the ranks."""
        shape, (world_size, on_gpus, _) = engine_shape(stage), self._ranks_shape
        has_room = stage.shares_gpus or shape.num_gpus + (world_size if on_gpus else 0) <= self.num_gpus
        if self._engines is None and (has_room or not shape.num_gpus):
            self._engines, self._engine_shape = asyncio.create_task(self._build_engines(stage)), shape

    async def _build_engines(self, stage: StageConfig) -> StageEngines:
        def build(
            config: EngineConfig, files: ModelFiles, max_model_len: int | None, role: str = "engine"
        ) -> Coroutine[Any, Any, EnginePool]:
            return build_engines(
                config,
                max_model_len=max_model_len,
                model_path=files.path,
                tokenizer=files.tokenizer,
                num_gpus=stage.cluster.num_gpus,
                shares_gpus=stage.shares_gpus,
                receives_weights=stage.sends_weights and isinstance(config, RolloutModelConfig),
                env=self._environment(stage) | stage.explorer.env_vars,
                max_restarts=stage.cluster.max_restarts,
                max_seconds_for_room=self._max_seconds_for_room(stage),
                max_silence=stage.explorer.engine_timeout,
                max_start_seconds=stage.synchronizer.sync_timeout,
                log=self.restarts,
                logs=self.logs,
                role=f"{stage.explorer.name}_{role}",
            )

        explorer, trained = stage.explorer, ModelFiles(self.model_path, self.tokenizer)
        rollout, *others = await asyncio.gather(
            build(explorer.rollout_model, trained, stage.model.max_model_len),
            *(
                build(
                    model,
                    self.auxiliary_models[model.model_path],
                    model.max_model_len,
                    f"auxiliary_{model.name}",
                )
                for model in explorer.auxiliary_models
            ),
        )
        names = [model.name for model in explorer.auxiliary_models]
        return StageEngines(rollout, dict(zip(names, others, strict=True)))

    async def engines(self, stage: StageConfig) -> StageEngines:
        """Those of the stage, when they can generate."""
        if self._engine_shape != engine_shape(stage):
            await self.close_engines()
        self.start_engines(stage)
        assert self._engines is not None
        return await asyncio.shield(self._engines)

    async def close_engines(self) -> None:
        engines, self._engines, self._engine_shape = self._engines, None, None
        if engines is None:
            return
        if not engines.done():
            engines.cancel()
        elif not engines.cancelled() and engines.exception() is None:
            await engines.result().close()

    async def close(self) -> None:
        """Ends all of them."""
        await self.close_engines()
        if self._ranks is not None:
            self._ranks.kill()

    def _max_seconds_for_room(self, stage: StageConfig) -> float | None:
        return stage.synchronizer.sync_timeout if self.on_cluster else None

    def _environment(self, stage: StageConfig) -> dict[str, str]:
        # none where there are no GPUs: Ray keeps processes ready for actors without an
        # environment of their own
        return self.env | (NO_GPUS if self.machine_has_gpus and not stage.cluster.num_gpus else {})


@dataclass(frozen=True)
class RunContext:
    """What all stages of a run share."""

    config: RunConfig
    preparing: Future[StageInputs]
    """Model and data are made and imported while Ray starts."""
    store: WritableStore
    status: Status
    computing: Compute
    configurations: Configurations
    stop: Shutdown
    peer: LedgerPeer | None = None
    """The trainer of an explorer, or the explorers of a trainer, in processes of their own."""
    kept_workers: KeptWorkers = field(default_factory=KeptWorkers)
    """Of experience operators, between two stages."""

    @property
    def inputs(self) -> StageInputs:
        return self.preparing.result()


class NextStage:
    """Starts engines and task stream of the next exploring stage beside other work: both take seconds."""

    def __init__(self, run: RunContext) -> None:
        self.run = run
        self._streams: dict[str, dict[str, Stream]] = {}
        self._probers: dict[str, TaskProber | None] = {}

    def start(self) -> None:
        """Does nothing when no exploring stage remains, or when it was started."""
        for stage in self.run.config.stages:
            is_done = self.run.store.stage_ended_at(stage.stage_name) is not None
            if stage.explores and not is_done:
                # engines that share GPUs start when the ranks sleep
                if not stage.shares_gpus:
                    self.run.computing.start_engines(stage)
                for stream in self.streams(stage).values():
                    stream.start()
                return

    async def start_after(self, step: int, synchronizer: Synchronizer) -> None:
        """Starts when `step` was trained, which has the cores for itself until then."""
        await synchronizer.wait_trained(step)
        self.start()

    def streams(self, stage: StageConfig) -> dict[str, Stream]:
        """The stage's task sets on their way through the task operators, by name.

        They read nothing before they are started.
        """
        if stage.stage_name not in self._streams:
            self._streams[stage.stage_name] = {
                taskset.name: self._stream(stage, taskset)
                for _, taskset in stage.buffer.explorer_input.train_tasksets()
            }
        return self._streams[stage.stage_name]

    def prober(self, stage: StageConfig) -> TaskProber | None:
        """Makes rollouts for the stage's task operators; None where they ask for none."""
        name, run = stage.stage_name, self.run
        if name not in self._probers:
            self._probers[name] = build_prober(stage, run.inputs, run.store, run.status)
        return self._probers[name]

    def _stream(self, stage: StageConfig, taskset: TasksetConfig) -> Stream:
        """Of this explorer, or shared with those of other processes."""
        open_stream = partial(self._own_stream, stage, taskset)
        if self.run.peer is None:
            return open_stream()
        lease = self.run.peer.lease(f"tasks/{taskset.name}")
        return SharedStream(
            self.run.peer.store, stage.stage_name, taskset.name, lease=lease, open_stream=open_stream
        )

    def _own_stream(self, stage: StageConfig, taskset: TasksetConfig) -> TaskStream | QueueStream:
        run, engines = self.run, self.prober(stage)
        pipeline = resolved_pipeline(stage, run.inputs)
        if taskset.storage_type == "queue":
            folder = queue_folder(taskset, run.config.job_dir)
            queue = QueueSpec(taskset, folder, pipeline, run.inputs.base_dir, stage.stage_name)
            return QueueStream(queue, run.store, status=run.status, engines=engines)
        write = None
        if (written := output_taskset(stage)) is not None:
            taskset, pipeline = written, pipeline.model_copy(update={"operators": ()})
            # without engines it was written while they started
            write = partial(write_output, stage, run.inputs, engines) if engines is not None else None
        spec = StreamSpec(
            taskset=taskset,
            source=run.inputs.source_of(taskset),
            pipeline=pipeline,
            base_dir=run.inputs.base_dir,
            stage=stage.stage_name,
            seed=taskset.task_selector.seed,
        )
        window = WINDOW_STEPS * stage.buffer.batch_size if taskset.is_streamed else WHOLE_SET
        stream = TaskStream(
            spec,
            run.store,
            window=window,
            status=run.status,
            engines=engines,
            write_taskset=write,
            max_restarts=stage.cluster.max_restarts,
        )
        if engines is not None:
            engines.wait_for(stream.asked)
        return stream

    async def close_streams(self, stage: StageConfig) -> None:
        """Those that were made for the stage."""
        prober = self._probers.get(stage.stage_name)
        if prober is not None:
            prober.close()
        for stream in self._streams.get(stage.stage_name, {}).values():
            await stream.close()

    async def close(self) -> None:
        for stage in self.run.config.stages:
            await self.close_streams(stage)
