"""The train loop: a batch from the store, one optimiser step, what it did as rows,
new weights for the engines.

A batch is recorded before it is trained. After a crash the recorded batches are trained again
in their order from the newest checkpoint, so that a resumed run ends where an uninterrupted one does.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from trinity_data.errors import TrainerError, TrinityError
from trinity_data.probe import TokenSequences
from trinity_data.schema import TABLES, rows_to_table
from trinity_data.shutdown import Shutdown
from trinity_data.status import Status
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_data.weights import WeightFolders, Weights, mark_latest
from trinity_trainer.metrics import (
    MEASURED_COLUMNS,
    batch_metrics,
    logprob_differences,
    num_trained_tokens,
    why_nothing_was_trained,
)
from trinity_trainer.worker_group import WorkerGroup

log = logging.getLogger(__name__)

TRAIN_COLUMNS = (
    *MEASURED_COLUMNS,
    "token_ids",
    "kept_tokens",
    "banned_tokens",
    "prompt_length",
    "temperature",
)


UPDATE_SKIPPED = "the gradient is not finite; weights and moments stay as they are"


class BatchSampler(Protocol):
    """Where the experiences of a step come from."""

    async def next(self, step: int) -> list[str] | None:
        """Ids for `step` in training order.

        An empty list when operators dropped them all, None at the end.
        """
        ...


@dataclass(frozen=True)
class TrainSettings:
    """The numbers of a stage that the loop needs."""

    stage: str
    first_step: int
    save_interval: int
    save_huggingface: str
    """`always`, `last` (the stage's end only) or `never`."""
    max_checkpoints: int
    """Older ones are removed; 0 keeps all."""
    max_skipped_updates: int = 3
    """Updates in a row whose gradient was not finite, after which the run stops."""
    replay: bool = False
    """Batches may hold rows that were trained before."""
    stop_timeout: float = 60
    """Seconds for the step under way and its checkpoint when the run is stopped."""
    probe: TokenSequences = ()
    """What engines that load a version are compared on."""
    configuration: str = ""
    """The id of the run's configuration, for the rows of `steps`."""


class Trainer:
    """Trains a stage step by step, as fast as its batches come."""

    def __init__(
        self,
        settings: TrainSettings,
        *,
        store: Store,
        ranks: WorkerGroup,
        batches: BatchSampler,
        folders: WeightFolders,
        job_dir: Path,
        on_trained: Callable[[int], Awaitable[None]],
        publishes_version: Callable[[int], bool],
        extra_metrics: Callable[[int], Mapping[str, float]],
        on_metrics: Callable[[int, Mapping[str, float]], None],
        status: Status,
        before_step: Callable[[int], Awaitable[None]] | None = None,
        stop: Shutdown | None = None,
    ) -> None:
        """`before_step` puts the ranks under the configuration that a step is trained under."""
        self.before_step = before_step
        self.stop = stop or Shutdown()
        self._under_way: asyncio.Future[None] | None = None
        self.settings, self.store, self.ranks, self.batches = settings, store, ranks, batches
        self.folders, self.job_dir, self.status = folders, job_dir, status
        self.on_trained, self.extra_metrics, self.on_metrics = on_trained, extra_metrics, on_metrics
        self.publishes_version = publishes_version
        self.published: dict[int, Weights] = {}
        self.last_step = settings.first_step - 1
        steps = store.table("steps", columns=["step", "stage"], stage=settings.stage)
        self._recorded_steps = set(steps["step"].to_pylist())
        self._step_ended = time.perf_counter()
        self._num_skipped = 0

    async def replay(self, checkpoint_step: int, *, publish_from: int | None = None) -> None:
        """Trains the recorded batches after the checkpoint again,
        and publishes versions from `publish_from` on.
        """
        self.last_step = checkpoint_step
        async with self._saved_when_stopped():
            while True:
                if (
                    publish_from is not None
                    and self.last_step >= publish_from
                    and self.publishes_version(self.last_step)
                ):
                    await self.publish(self.last_step)
                step = self.last_step + 1
                if (recorded := self.store.batch(step)) is None:
                    break
                log.info("replaying step %d with its %d recorded experiences", step, len(recorded))
                await self._to_its_end(self.train_step(step, recorded))
            if publish_from is not None and not self.published:
                await self.publish(self.last_step)

    def weights_of(self, version: int) -> Weights:
        """The published weights of `version`.

        Of the oldest newer one when a restart could not make it again.
        """
        return self.published[min(there for there in self.published if there >= version)]

    async def train(self, last_step: int | None) -> None:
        """Runs until `last_step`, or until no batch is left."""
        async with self._saved_when_stopped():
            while last_step is None or self.last_step < last_step:
                step = self.last_step + 1
                ids = await self.batches.next(step)
                if ids is None:
                    break
                self.store.form_batch(self.settings.stage, step, ids, replay=self.settings.replay)
                await self._to_its_end(self.train_step(step, ids, last=step == last_step))
                if self.publishes_version(step):
                    await self.publish(step)
                await self.on_trained(step)
            await self._to_its_end(self._save_last())

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
                if not await self.stop.bounded(self._end_and_save(), self.settings.stop_timeout):
                    log.warning("stopped without a checkpoint of step %d", self.last_step)
            except (TrinityError, OSError) as error:
                log.warning("stopped without a checkpoint of step %d: %s", self.last_step, error)
            raise

    async def _end_and_save(self) -> None:
        if self._under_way is not None:
            await self._under_way
        newest = self.store.latest_checkpoint()
        if self.last_step >= self.settings.first_step and (newest is None or newest.step < self.last_step):
            await self.save(self.last_step)
            log.info("saved step %d", self.last_step)

    async def train_step(self, step: int, ids: list[str], *, last: bool = False) -> None:
        """Trains one recorded batch and writes down what it did, unless a run before a crash had done so.

        A batch without a token to train makes no optimiser step: the weights stay,
        and the step counts as one of the run's.
        """
        started_at, started = datetime.now(UTC), time.perf_counter()
        self.status.activity = "training"
        if self.before_step is not None:
            await self.before_step(step)
        rows = self.store.read(ids, columns=TRAIN_COLUMNS)
        read = time.perf_counter()
        trains = bool(ids) and num_trained_tokens(rows) > 0
        metrics, effects = await self.ranks.train_step(rows) if trains else ({}, None)
        trained = time.perf_counter()
        metrics |= {"time/read": read - started, "time/train": trained - read}
        metrics |= batch_metrics(rows, trained_version=step - 1)
        if effects is not None and "logprob_diff_max" in metrics:
            metrics |= logprob_differences(rows, effects["logprobs"], trained_version=step - 1)
        self.last_step = step
        if step not in self._recorded_steps:
            row = self._step_row(step, rows, metrics, started_at)
            await self._record(step, row, metrics, effects)
        self._stop_when_nothing_is_learned(step, metrics)
        interval = self.settings.save_interval
        if interval and not last and (step - self.settings.first_step + 1) % interval == 0:
            await self.save(step)

    def _stop_when_nothing_is_learned(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises a TrainerError after `max_skipped_updates` in a row."""
        self._num_skipped = self._num_skipped + 1 if metrics.get("update_skipped") else 0
        if self._num_skipped < self.settings.max_skipped_updates:
            return
        numbers = ", ".join(
            f"{name} {metrics.get(name, math.nan):g}" for name in ("loss", "grad_norm", "nonfinite_logprobs")
        )
        raise TrainerError(
            f"stage {self.settings.stage}: {self._num_skipped} update(s) in a row were skipped, "
            f"the last one at step {step}, "
            f"because their gradients are not finite ({numbers}); nothing is learned. "
            "Look for advantages and log-probs of "
            "these steps that are no numbers, lower algorithm.optimizer.lr, "
            "or allow more with trainer.max_skipped_updates"
        )

    async def _record(
        self, step: int, row: dict[str, object], metrics: Mapping[str, float], effects: pa.Table | None
    ) -> None:
        tables = {"steps": rows_to_table("steps", [row])}
        if effects is not None:
            tables["batches"] = _batch_rows(self.settings.stage, step, effects)
        else:
            tables["events"] = self._event(step, "nothing_trained", why_nothing_was_trained(metrics))
        if metrics.get("update_skipped"):
            log.warning("stage %s, step %d: %s", self.settings.stage, step, UPDATE_SKIPPED)
            tables["events"] = self._event(step, "update_skipped", UPDATE_SKIPPED)
        await asyncio.wrap_future(self.store.submit(Commit(tables=tables)))
        self._recorded_steps.add(step)

    def _event(self, step: int, kind: str, message: str) -> pa.Table:
        event: dict[str, object] = {
            "at": datetime.now(UTC),
            "stage": self.settings.stage,
            "step": step,
            "kind": kind,
            "message": message,
        }
        return rows_to_table("events", [event])

    def _step_row(
        self, step: int, rows: pa.Table, metrics: dict[str, float], started_at: datetime
    ) -> dict[str, object]:
        now = time.perf_counter()
        seconds, self._step_ended = now - self._step_ended, now
        metrics |= {"time/step": seconds} | dict(self.extra_metrics(step))
        self.on_metrics(step, metrics)
        self.status.steps_done += 1
        self.status.step, self.status.trained_version, self.status.reward = (
            step,
            step,
            metrics.get("reward/mean"),
        )
        return {
            "step": step,
            "stage": self.settings.stage,
            "stage_step": step - self.settings.first_step + 1,
            "model_version": step,
            "num_experiences": rows.num_rows,
            "num_rollouts": int(metrics.get("num_rollouts", 0)),
            "num_tokens": int(metrics.get("num_tokens", 0)),
            "reward": metrics.get("reward/mean"),
            "loss": metrics.get("loss"),
            "grad_norm": metrics.get("grad_norm"),
            "learning_rate": metrics.get("learning_rate"),
            "metrics": sorted(metrics.items()),
            "started_at": started_at,
            "seconds": seconds,
            "configuration": self.settings.configuration,
        }

    async def publish(self, step: int) -> Weights:
        """Weights of `step` for the engines; written once."""
        if step in self.published:
            return self.published[step]
        started = time.perf_counter()
        weights, num_bytes = await self.ranks.publish(
            step, self.folders.path(step), probe=self.settings.probe
        )
        row: dict[str, object] = {
            "version": step,
            "stage": self.settings.stage,
            "path": weights.folder,
            "method": self.folders.method,
            "num_bytes": num_bytes,
            "published_at": datetime.now(UTC),
            "seconds": time.perf_counter() - started,
        }
        commit = Commit(tables={"model_versions": rows_to_table("model_versions", [row])})
        await asyncio.wrap_future(self.store.submit(commit))
        self.published[step] = weights
        return weights

    async def _save_last(self) -> None:
        newest = self.store.latest_checkpoint()
        if newest is not None and newest.step == self.last_step:
            if self.settings.save_huggingface != "last" or self._has_huggingface(self.last_step):
                return
            # an interval ended here before anyone knew that the stage would too;
            # a kill now goes back to an older one
            self.store.forget_checkpoint(self.last_step)
        await self.save(self.last_step, last=True)

    def _has_huggingface(self, step: int) -> bool:
        return (self.job_dir / f"global_step_{step}" / "actor" / "huggingface").exists()

    async def save(self, step: int, *, last: bool = False) -> None:
        """A full checkpoint, known to the ledger only when it is whole."""
        self.status.activity = "saving"
        folder = self.job_dir / f"global_step_{step}"
        extra = {"step": step, "stage": self.settings.stage, "first_step": self.settings.first_step}
        with_huggingface = self.settings.save_huggingface == "always" or (
            last and self.settings.save_huggingface == "last"
        )
        await self.ranks.save(folder, extra, with_huggingface=with_huggingface)
        self.store.record_checkpoint(step, folder.name, stage=self.settings.stage)
        mark_latest(self.job_dir, step)
        self._remove_old_checkpoints(step)

    def _remove_old_checkpoints(self, newest: int) -> None:
        """Of this stage: the end of the one before is what a replay of this stage starts from."""
        steps = sorted(
            int(folder.name.removeprefix("global_step_")) for folder in self.job_dir.glob("global_step_*")
        )
        mine = [step for step in steps if self.settings.first_step <= step <= newest]
        for step in mine[: -self.settings.max_checkpoints] if self.settings.max_checkpoints else []:
            self.store.forget_checkpoint(step)
            shutil.rmtree(self.job_dir / f"global_step_{step}", ignore_errors=True)


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
