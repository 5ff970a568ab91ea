"""The train loop: a batch from the store, one optimizer step, what it did as rows,
new weights for the engines.

A batch is recorded before it is trained. After a crash of the run, or of a worker, the recorded batches are
trained again in their order from the newest checkpoint, so that the run ends where an uninterrupted one does.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from trinity_data.atomic import remove
from trinity_data.config import StageConfig, TrainerConfig
from trinity_data.errors import TrainerError, TrinityError
from trinity_data.probe import Probe
from trinity_data.reporter import Reporter
from trinity_data.schema import TABLES, rows_to_table
from trinity_data.shutdown import Shutdown
from trinity_data.stage_inputs import StageInputs
from trinity_data.store.protocol import WritableStore
from trinity_data.store.types import Commit
from trinity_data.synchronizer import Synchronizer
from trinity_data.weights import HeldVersions, Weights, mark_latest
from trinity_trainer.metrics import (
    MEASURED_COLUMNS,
    batch_metrics,
    learning_signal,
    logprob_differences,
    num_trained_tokens,
    why_nothing_was_trained,
)
from trinity_trainer.offline_sampler import OfflineSampler
from trinity_trainer.sampling.build import build_sampler, replays
from trinity_trainer.sampling.sampler import BatchSampler
from trinity_trainer.stage_spec import ConfigurationHistory, StageSpecs
from trinity_trainer.weight_sender import BUFFER_BYTES, WeightSender
from trinity_trainer.worker_group import WorkerGroup
from trinity_trainer.worker_restarts import WorkerRestarts

log = logging.getLogger(__name__)

TRAIN_COLUMNS = (
    *MEASURED_COLUMNS,
    "token_ids",
    "kept_tokens",
    "banned_tokens",
    "prompt_length",
    "temperature",
    "token_advantages",
)


UPDATE_SKIPPED = "the gradient is not finite; weights and optimizer stay as they are"


class Trainer:
    """Trains a stage step by step, as fast as its batches come."""

    def __init__(
        self,
        stage: StageConfig,
        *,
        store: WritableStore,
        ranks: WorkerGroup,
        specs: StageSpecs,
        batches: BatchSampler,
        synchronizer: Synchronizer,
        reporter: Reporter,
        stop: Shutdown,
    ) -> None:
        self.stage, self.store, self.ranks = stage, store, ranks
        self.config: TrainerConfig = stage.trainer
        self.specs, self.batches, self.synchronizer = specs, batches, synchronizer
        self.reporter, self.status, self.stop = reporter, reporter.status, stop
        self.job_dir, self.first_step = store.root.parent, synchronizer.first_step
        self.last_step = self.first_step - 1
        self._publish_from = synchronizer.required_version(synchronizer.explored + 1)
        """No step to come is explored with an older version."""
        self._spec = specs.current
        self.workers = WorkerRestarts(
            stage,
            ranks,
            self._put_back,
            store=store,
            synchronizer=synchronizer,
            status=self.status,
            stop=stop,
        )
        shares_gpus = stage.shares_gpus
        self.sender = WeightSender(ranks, self.workers, max_buffer=BUFFER_BYTES if shares_gpus else None)
        self._is_asleep = False
        self._under_way: asyncio.Future[None] | None = None
        steps = store.table("steps", columns=["step", "stage"], stage=stage.stage_name)
        self._recorded_steps = set(steps["step"].to_pylist())
        self._step_ended = time.perf_counter()
        self._num_skipped = 0

    async def restore(self) -> int:
        """Puts the ranks at the newest checkpoint; returns the step that it stands for."""
        return await self.workers.call(self.first_step, self._load_checkpoint)

    async def _load_checkpoint(self) -> int:
        await self.ranks.start_stage(self._spec, reference_path=self.specs.inputs.model_path)
        checkpoint = self.store.latest_checkpoint()
        if checkpoint is None:
            return self.first_step - 1
        with_optimizer = checkpoint.step >= self.first_step
        await self.ranks.load(self.job_dir / checkpoint.path, with_optimizer=with_optimizer)
        return checkpoint.step

    async def sleep(self) -> None:
        """Moves what the ranks have on GPUs to the memory of the machine."""
        await self.workers.call(self.last_step, self.ranks.sleep)
        self._is_asleep = True

    async def wake(self) -> None:
        """Moves it back."""
        self._is_asleep = False
        await self.workers.call(self.last_step, self.ranks.wake)

    async def _put_back(self) -> int:
        """Trains new ranks as far as the old ones were; writes nothing and publishes nothing.

        Returns the step of the checkpoint that they begin with.
        """
        checkpoint_step = await self._load_checkpoint()
        await self._hold_again(checkpoint_step)
        for step in range(checkpoint_step + 1, self.last_step + 1):
            recorded = self.store.batch(step)
            assert recorded is not None
            log.info("training step %d again with its %d recorded experiences", step, len(recorded))
            await self._train(step, self._take_batch(step, recorded))
            await self._hold_again(step)
            await self.synchronizer.still_training()
        await self._replace_lost_versions()
        if self._is_asleep:
            await self.ranks.sleep()
        return checkpoint_step

    async def _hold_again(self, step: int) -> None:
        """The version of `step`, where the ranks before held it for the engines."""
        versions = self.synchronizer.folders
        is_held = isinstance(versions, HeldVersions) and step >= versions.oldest
        if is_held and step in self.synchronizer.published:
            await self._ask_for_weights(step)

    async def _replace_lost_versions(self) -> None:
        """Versions before the checkpoint are gone, but for the one that the engines have. Where the newest is
        gone, the last step's is published in its place.
        """
        versions, published, started = (
            self.synchronizer.folders,
            self.synchronizer.published,
            time.perf_counter(),
        )
        if not isinstance(versions, HeldVersions) or not published:
            return
        there = self.ranks.held | {versions.oldest}
        kept = {version: weights for version, weights in published.items() if version in there}
        if max(published) not in kept:
            num_bytes, probe = await self._ask_for_weights(self.last_step)
            weights, tables = self._version(self.last_step, num_bytes, probe, started)
            if self.last_step in self._recorded_steps:  # else the row comes with that of the step
                await asyncio.wrap_future(self.store.submit(Commit(tables=tables)))
            kept[weights.version] = weights
        self.synchronizer.published = kept

    async def replay(self, checkpoint_step: int) -> None:
        """Trains the recorded batches after the checkpoint again,
        and publishes the versions that steps to come are explored with.
        """
        self.last_step, synchronizer = checkpoint_step, self.synchronizer
        async with self._saved_when_stopped():
            while True:
                if self._publishes(self.last_step):
                    await self.publish(self.last_step)
                step = self.last_step + 1
                if (recorded := self.store.batch(step)) is None:
                    break
                log.info("replaying step %d with its %d recorded experiences", step, len(recorded))
                await self._to_its_end(self.train_step(step, recorded))
            if synchronizer.folders is not None and not synchronizer.published:
                await self.publish(self.last_step)
        await synchronizer.finished_training(self.last_step)

    async def train(self, last_step: int | None) -> None:
        """Runs until `last_step`, or until no batch is left."""
        async with self._saved_when_stopped():
            while last_step is None or self.last_step < last_step:
                step = self.last_step + 1
                ids = await self.synchronizer.answer_requests(
                    self.batches.next(step), lambda version: self._to_its_end(self.publish(version))
                )
                if ids is None:
                    break
                await self.synchronizer.begin_turn("trainer")
                await self._to_its_end(self.train_step(step, ids, last=step == last_step))
                await self.synchronizer.finished_training(step)
            await self.synchronizer.begin_turn("trainer")
            await self._to_its_end(self._save_last())
            await self.synchronizer.end_turn("trainer")

    async def _to_its_end(self, work: Coroutine[Any, Any, None]) -> None:
        """Goes on with `work` when the trainer is stopped: the ranks are in the middle of it."""
        self._under_way = asyncio.ensure_future(work)
        await asyncio.shield(self._under_way)

    @asynccontextmanager
    async def _saved_when_stopped(self) -> AsyncIterator[None]:
        """What was trained since the last checkpoint is in another one when the run is
        stopped, or fails elsewhere.
        """
        try:
            yield
        except asyncio.CancelledError:
            self.status.activity = "stopping"
            try:
                if not await self.stop.bounded(self._end_and_save(), self.config.stop_timeout):
                    log.warning("stopped without a checkpoint of step %d", self.last_step)
            except (TrinityError, OSError) as error:
                log.warning("stopped without a checkpoint of step %d: %s", self.last_step, error)
            raise

    async def _end_and_save(self) -> None:
        if self._under_way is not None:
            await self._under_way
        newest = self.store.latest_checkpoint()
        if self.last_step >= self.first_step and (newest is None or newest.step < self.last_step):
            await self.save(self.last_step)
            log.info("saved step %d", self.last_step)

    async def train_step(self, step: int, ids: list[str], *, last: bool = False) -> None:
        """Records a batch, trains it and records what it did, unless a run before a crash had done so.

        A batch without a token to train makes no optimizer step: the weights stay,
        and the step counts as one of the run's.
        """
        started_at, started = datetime.now(UTC), time.perf_counter()
        self.status.activity = "training"
        rows = self._take_batch(step, ids)
        read = time.perf_counter()
        metrics, effects = await self.workers.call(step, partial(self._train, step, rows))
        trained = time.perf_counter()
        metrics |= {"time/read": read - started, "time/train": trained - read}
        metrics |= batch_metrics(rows, trained_version=step - 1, detailed=self.reporter.detailed)
        if effects is not None and "logprob_diff_max" in metrics:
            metrics |= logprob_differences(rows, effects["logprobs"], trained_version=step - 1)
        if effects is not None and self.stage.is_live:
            metrics["yield/signal"] = learning_signal(rows["response_length"], effects)
        self.last_step = step
        if step not in self._recorded_steps:
            await self._record(step, rows, metrics, effects, started_at)
        self._num_skipped = self._num_skipped + 1 if metrics.get("update_skipped") else 0
        if self._num_skipped >= self.config.max_skipped_updates:
            raise self._nothing_learned(step, metrics)
        interval = self.config.save_interval
        if interval and not last and (step - self.first_step + 1) % interval == 0:
            await self.save(step)

    def _take_batch(self, step: int, ids: list[str]) -> pa.Table:
        return self.store.take_batch(
            self.stage.stage_name, step, ids, columns=TRAIN_COLUMNS, replay=replays(self.stage)
        )

    async def _train(self, step: int, rows: pa.Table) -> tuple[dict[str, float], pa.Table | None]:
        """Trains the rows with the settings of `step`; makes no optimizer step where they have no token."""
        if (spec := self.specs.at(step)) != self._spec:
            await self.ranks.change_settings(spec, reference_path=self.specs.inputs.model_path)
            self._spec = spec
        if not rows.num_rows or not num_trained_tokens(rows):
            return {}, None
        return await self.ranks.train_step(rows)

    def _nothing_learned(self, step: int, metrics: Mapping[str, float]) -> TrainerError:
        numbers = ", ".join(
            f"{name} {metrics.get(name, math.nan):g}" for name in ("loss", "grad_norm", "nonfinite_logprobs")
        )
        return TrainerError(
            f"stage {self.stage.stage_name}: {self._num_skipped} update(s) in a row were skipped, "
            f"the last one at step {step}, "
            f"because their gradients are not finite ({numbers}); nothing is learned. "
            "Look for advantages and log-probs of "
            "these steps that are no numbers, lower algorithm.optimizer.lr, "
            "or allow more with trainer.max_skipped_updates"
        )

    async def _record(
        self,
        step: int,
        rows: pa.Table,
        metrics: Mapping[str, float],
        effects: pa.Table | None,
        started_at: datetime,
    ) -> None:
        """Reports the step, records it, and publishes its version where one is due.

        `steps`, `batches`, `events` and `model_versions` get their rows in one transaction; then the folder
        with the weights gets its name. After a crash in between, `replay` publishes the version.
        """
        stage = self.stage.stage_name
        weights, tables = await self._write_weights(step) if self._publishes(step) else (None, {})
        now = time.perf_counter()
        seconds, self._step_ended = now - self._step_ended, now
        metrics = self.reporter.trained(step, {**metrics, "time/step": seconds})
        tables["steps"] = self._step_row(step, rows.num_rows, metrics, started_at, seconds)
        if effects is not None:
            tables["batches"] = _batch_rows(stage, step, effects)
        commit = Commit(tables=tables)
        if effects is None:
            message = why_nothing_was_trained(metrics)
            done = self.store.log_event(stage, step, "nothing_trained", message, commit=commit)
        elif metrics.get("update_skipped"):
            log.warning("stage %s, step %d: %s", stage, step, UPDATE_SKIPPED)
            done = self.store.log_event(stage, step, "update_skipped", UPDATE_SKIPPED, commit=commit)
        else:
            done = self.store.submit(commit)
        await asyncio.wrap_future(done)
        self._recorded_steps.add(step)
        if weights is not None:
            await self._hand_over(weights)

    def _step_row(
        self, step: int, num_rows: int, metrics: Mapping[str, float], started_at: datetime, seconds: float
    ) -> pa.Table:
        row: dict[str, object] = {
            "step": step,
            "stage": self.stage.stage_name,
            "stage_step": step - self.first_step + 1,
            "model_version": step,
            "num_experiences": num_rows,
            "reward": metrics.get("reward/mean"),
            "metrics": sorted(metrics.items()),
            "started_at": started_at,
            "seconds": seconds,
            "configuration": self.specs.history.current,
        }
        row |= {name: int(metrics.get(name, 0)) for name in ("num_rollouts", "num_tokens")}
        row |= {name: metrics.get(name) for name in ("loss", "grad_norm", "learning_rate")}
        return rows_to_table("steps", [row])

    def _publishes(self, step: int) -> bool:
        """Whether a step to come is explored with the version of `step`."""
        return step >= self._publish_from and self.synchronizer.publishes_version(step)

    async def publish(self, step: int) -> None:
        """Records and publishes the version of a step that is recorded already, unless that was done."""
        if step not in self.synchronizer.published:
            await self.synchronizer.begin_turn("trainer")
            weights, tables = await self._write_weights(step)
            await asyncio.wrap_future(self.store.submit(Commit(tables=tables)))
            await self._hand_over(weights)

    async def _write_weights(self, step: int) -> tuple[Weights, dict[str, pa.Table]]:
        """The weights of `step` in a folder that has no name yet, or with the ranks, and their row of
        `model_versions`.
        """
        started = time.perf_counter()
        num_bytes, probe = await self.workers.call(step, partial(self._ask_for_weights, step))
        return self._version(step, num_bytes, probe, started)

    async def _ask_for_weights(self, step: int) -> tuple[int, Probe | None]:
        """The ranks write them, or hold them. Returns their bytes, and what they say of the probe."""
        folders = self.synchronizer.folders
        assert folders is not None
        dtype = self.stage.explorer.rollout_model.weights_dtype(on_gpus=self.stage.cluster.num_gpus > 0)
        sequences = self.specs.probe
        if isinstance(folders, HeldVersions):
            return await self.ranks.keep_weights(
                step,
                dtype=dtype,
                sequences=sequences,
                forget_before=folders.oldest,
                in_main_memory=self.stage.shares_gpus,
            )
        draft = folders.draft(step)
        await asyncio.to_thread(remove, draft)  # a part of it, where a worker died
        return await self.ranks.write_weights(draft, dtype=dtype, sequences=sequences)

    def _version(
        self, step: int, num_bytes: int, probe: Probe | None, started: float
    ) -> tuple[Weights, dict[str, pa.Table]]:
        folders = self.synchronizer.folders
        assert folders is not None
        folder = "" if isinstance(folders, HeldVersions) else str(folders.path(step))
        weights = Weights(step, folder, probe, folders.node)
        row: dict[str, object] = {
            "version": step,
            "stage": self.stage.stage_name,
            "path": folder or None,
            "method": folders.method,
            "num_bytes": num_bytes,
            "published_at": datetime.now(UTC),
            "seconds": time.perf_counter() - started,
        }
        return weights, {"model_versions": rows_to_table("model_versions", [row])}

    async def _hand_over(self, weights: Weights) -> None:
        """Gives the folder of recorded weights its name, and the weights to the explorer."""
        folders = self.synchronizer.folders
        assert folders is not None
        # it waits for the disk
        await asyncio.to_thread(folders.publish, weights.version)
        await self.synchronizer.publish(weights)

    async def _save_last(self) -> None:
        newest = self.store.latest_checkpoint()
        if newest is not None and newest.step == self.last_step:
            huggingface = self._checkpoint_folder(self.last_step) / "actor" / "huggingface"
            if self.config.save_hf_checkpoint != "last" or huggingface.exists():
                return
            # it was saved at an interval, before the stage was known to end with it;
            # a kill from now on goes back to an older one
            self.store.forget_checkpoint(self.last_step)
        await self.save(self.last_step, last=True)

    async def save(self, step: int, *, last: bool = False) -> None:
        """A full checkpoint, which the ledger names only when it is complete."""
        self.status.activity = "saving"
        folder, policy = self._checkpoint_folder(step), self.config.save_hf_checkpoint
        extra = {"step": step, "stage": self.stage.stage_name, "first_step": self.first_step}
        with_huggingface = policy == "always" or (last and policy == "last")
        write = partial(self.ranks.save, folder, extra, with_huggingface=with_huggingface)
        await self.workers.call(step, write)
        self.store.record_checkpoint(step, folder.name, stage=self.stage.stage_name)
        mark_latest(self.job_dir, step)
        # only those of this stage: the end of the one before is what a replay of this one starts from
        names = (folder.name for folder in self.job_dir.glob("global_step_*"))
        steps = sorted(int(name.removeprefix("global_step_")) for name in names)
        steps = [each for each in steps if self.first_step <= each <= step]
        num_kept = self.config.max_checkpoints_to_keep
        for old in steps[:-num_kept] if num_kept else []:
            self.store.forget_checkpoint(old)
            shutil.rmtree(self._checkpoint_folder(old), ignore_errors=True)

    def _checkpoint_folder(self, step: int) -> Path:
        return self.job_dir / f"global_step_{step}"


def build_trainer(
    stage: StageConfig,
    inputs: StageInputs,
    *,
    store: WritableStore,
    ranks: WorkerGroup,
    synchronizer: Synchronizer,
    reporter: Reporter,
    history: ConfigurationHistory,
    stop: Shutdown,
) -> Trainer:
    """The trainer of a stage with its batch sampler. Reads data files of a stage that only trains."""
    batches = build_sampler(stage, inputs, store, synchronizer)
    specs = StageSpecs(
        stage,
        inputs,
        history,
        first_step=synchronizer.first_step,
        job_dir=store.root.parent,
        num_units=batches.data.num_units if isinstance(batches, OfflineSampler) else 0,
    )
    return Trainer(
        stage,
        store=store,
        ranks=ranks,
        specs=specs,
        batches=batches,
        synchronizer=synchronizer,
        reporter=reporter,
        stop=stop,
    )


def _batch_rows(stage: str, step: int, effects: pa.Table) -> pa.Table:
    count = effects.num_rows
    columns = {name: effects[name] for name in effects.column_names} | {
        "stage": pa.array([stage] * count),
        "step": pa.array([step] * count, pa.int64()),
        "position": pa.array(range(count), pa.int32()),
    }
    schema = TABLES["batches"]
    # what no part of the step computes, such as a teacher's log-probs, is null
    filled = [columns.get(field.name, pa.nulls(count, field.type)) for field in schema]
    return pa.table(filled, schema=schema)
