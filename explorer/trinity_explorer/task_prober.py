"""Rollouts of tasks for task operators, before they are trained on, as rows of `task_probes`.

What is on record for the same model, asked in the same way, is not asked again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from trinity_data.config import StageConfig
from trinity_data.dataset.row import columns_text
from trinity_data.dataset.task import Task
from trinity_data.errors import OperatorError
from trinity_data.schema import content_id, rows_to_table
from trinity_data.status import Status
from trinity_data.store.protocol import WritableStore
from trinity_data.store.types import Commit
from trinity_data.weights import Weights
from trinity_explorer.engine_model import EngineModel
from trinity_explorer.probe_record import ProbeRecord
from trinity_explorer.rollout import Group, RolloutRunner, Row, sampling_of
from trinity_explorer.slots import RolloutEngines
from trinity_operators.endpoint import ROLLOUT_MODEL, LanguageModel
from trinity_operators.task_engines import TriedTask, stage_models

log = logging.getLogger(__name__)
_T = TypeVar("_T")

_SEED_DIGITS = 7


class ProbeConditions(Protocol):
    """All that decides what a rollout of a task comes to, but for the task's row."""

    def model(self, weights: Weights) -> str:
        """A digest of the weights that a stage begins with."""
        ...

    def of_task(self, task: Task) -> Mapping[str, Any]: ...

    def of_taskset(self, name: str) -> Mapping[str, Any]:
        """Those of tasks that name no workflow and no reward function of their own."""
        ...


@dataclass(frozen=True)
class _Asked:
    """What an operator wants to know, and of whom."""

    runner: RolloutRunner
    model: str
    version: int
    num_rollouts: int
    pass_above: float


@dataclass(frozen=True)
class _Probe:
    """A task that is asked about."""

    key: str
    """Equal for what is asked in the same way."""
    task: Task
    settings: str


class TaskProber:
    """The engines of one stage for its task operators: made in their loop, asked from threads."""

    def __init__(
        self,
        stage: StageConfig,
        store: WritableStore,
        status: Status,
        conditions: ProbeConditions,
    ) -> None:
        self.stage, self.config, self.store, self.status = stage, stage.explorer, store, status
        self.conditions, self.record = conditions, ProbeRecord(store)
        self.model_names = stage_models(stage.explorer)
        self._tasksets = {each.name: each for _, each in stage.buffer.explorer_input.train_tasksets()}
        self._loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[tuple[RolloutRunner, Weights]] = self._loop.create_future()
        """With the first weights."""
        self._weights: Weights | None = None
        """That the engines have now."""
        self._models: dict[int, str] = {}
        """Digests of weights, by version."""
        self._is_exploring = False
        self._streams: list[Callable[[], Awaitable[None]]] = []
        self._waiting = set[Future[Any]]()
        self._goes_on: Callable[[], Awaitable[None]] | None = None
        self._closed = False

    def wait_for(self, asked: Callable[[], Awaitable[None]]) -> None:
        """`asked` returns when the operators of a task set that is read before the first step ask no more."""
        self._streams.append(asked)

    def open(
        self,
        runner: RolloutRunner,
        weights: Weights,
        *,
        goes_on: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """From now on operators get what they ask for, with these weights, which the engines have.

        `goes_on` is called whenever a task has ended.
        """
        self._weights = weights
        if not self._opened.done():
            self._goes_on = goes_on
            self._opened.set_result((runner, weights))

    async def run(
        self, runner: RolloutRunner, weights: Weights, *, goes_on: Callable[[], Awaitable[None]]
    ) -> None:
        """As `open`, before each step; waits for those that ask before the first."""
        self.open(runner, weights, goes_on=goes_on)
        for asked in self._streams:
            await asked()
        self._is_exploring = True

    def close(self) -> None:
        """An operator that waits fails."""
        self._closed = True
        for waiting in list(self._waiting):
            waiting.cancel()

    def attempt(
        self, tasks: Sequence[Task], *, num_rollouts: int, pass_above: float, runs: Sequence[Path] | None
    ) -> list[TriedTask]:
        """As of `TaskEngines`; not to be called in the loop."""
        return self._waited(self._attempt(tasks, num_rollouts, pass_above, runs))

    def models(self) -> Mapping[str, LanguageModel]:
        """As of `TaskEngines`; not to be called in the loop."""
        return self._waited(self._opened_models())

    def described(self, taskset: str) -> Mapping[str, Any]:
        """As of `TaskEngines`; not to be called in the loop."""
        return {"model": self._waited(self._opened_model()), **self.conditions.of_taskset(taskset)}

    def _waited(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Its answer. Raises OperatorError where the stage ends before."""
        if self._closed:
            work.close()
            raise OperatorError("the stage ends")
        waiting = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._waiting.add(waiting)
        try:
            return waiting.result()
        except CancelledError:
            raise OperatorError("the stage ends") from None
        finally:
            self._waiting.discard(waiting)

    async def _opened_models(self) -> Mapping[str, LanguageModel]:
        runner, _ = await asyncio.shield(self._opened)
        return {**runner.auxiliary_models, ROLLOUT_MODEL: EngineModel(runner.engines, runner.template)}

    async def _opened_model(self) -> str:
        """The digest of the weights that the stage begins with."""
        _, first = await asyncio.shield(self._opened)
        if first.version not in self._models:
            self._models[first.version] = await asyncio.to_thread(self.conditions.model, first)
        return self._models[first.version]

    async def _attempt(
        self, tasks: Sequence[Task], num_rollouts: int, pass_above: float, runs: Sequence[Path] | None
    ) -> list[TriedTask]:
        model = await self._opened_model()
        (runner, first), weights = self._opened.result(), self._weights
        assert weights is not None
        if weights.version != first.version:
            # their files are removed with the next version; this run finds them again by their number
            model = content_id(model, str(self.store.root), weights.version)
        asked = _Asked(runner, model, weights.version, num_rollouts, pass_above)
        probes = [self._probe(task, model) for task in tasks]
        keys = [probe.key for probe in probes]
        tried = await asyncio.to_thread(self.record.find, set(keys), num_rollouts, runs)
        missing = {probe.key: probe for probe in probes if probe.key not in tried}
        if not self._is_exploring:
            self.status.begin_rollouts(len(missing) * num_rollouts, activity="trying tasks")
        started, on_record = time.perf_counter(), len(tried)
        waiting = iter(missing.values())

        async def work() -> None:
            for probe in waiting:
                tried[probe.key] = await self._try(probe, asked)
                self.record.add(probe.key, tried[probe.key])

        # a task each at a time, so that a large set has no more of them under way than rollouts
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(runner.slots.number, len(missing))):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        made = [tried[key] for key in missing]
        requests, tokens = (sum(getattr(each, name) for each in made) for name in ("requests", "tokens"))
        message = (
            f"{len(missing)} tasks, {num_rollouts} rollouts each: {requests} requests, {tokens} tokens, "
            f"{time.perf_counter() - started:.1f} s; {on_record} tasks were on record"
        )
        log.info("stage %s, pass rates: %s", self.stage.stage_name, message)
        name, step = self.stage.stage_name, weights.version
        await asyncio.wrap_future(self.store.log_event(name, step, "tasks_probed", message))
        return [tried[key] for key in keys]

    def _probe(self, task: Task, model: str) -> _Probe:
        settings = json.dumps(self.conditions.of_task(task), sort_keys=True)
        key = content_id(model, settings, task.messages, task.answer, columns_text(task.columns))
        return _Probe(key, task, settings)

    async def _try(self, probe: _Probe, asked: _Asked) -> TriedTask:
        """Rollouts of one task, whose row is durable when it returns."""
        key, task = probe.key, probe.task
        started, engines = time.perf_counter(), RolloutEngines(asked.runner.slots, on_one_engine=True)
        sampling = sampling_of(self._tasksets[task.taskset].rollout_args, self.stage.model)
        group = Group(
            f"probe/{key}", self.stage.stage_name, asked.version, 0, task,
            epoch=0, refill=0, repeat_times=asked.num_rollouts,
        )  # fmt: skip

        async def run(rollout: int) -> Row:
            with await engines.slot() as batcher:
                rows = await asked.runner.run(
                    group, rollout, batcher=batcher, sampling=sampling,
                    source={}, seed=int(key[:_SEED_DIGITS], 16),
                )  # fmt: skip
            last = rows[-1]
            reward = cast("float | None", last.get("reward"))
            if not self._is_exploring:
                self.status.count_rollout(error=str(last["error"]), reward=reward, accuracy=None)
            return last

        rows = await asyncio.gather(*map(run, range(asked.num_rollouts)))
        errors = [str(row["error"]) for row in rows if row["error"]]
        tried = TriedTask(
            tuple(float(str(row["reward"])) for row in rows if not row["error"]),
            errors[0] if errors else "",
            requests=engines.requests, tokens=engines.tokens, num_rollouts=asked.num_rollouts,
        )  # fmt: skip
        row = self._row(probe, asked, tried) | {"seconds": time.perf_counter() - started}
        commit = Commit(tables={"task_probes": rows_to_table("task_probes", [row])})
        await asyncio.wrap_future(self.store.submit(commit))
        if self._goes_on is not None:
            await self._goes_on()
        return tried

    def _row(self, probe: _Probe, asked: _Asked, tried: TriedTask) -> Row:
        task = probe.task
        return {
            "probe": probe.key,
            "at": datetime.now(UTC),
            "stage": self.stage.stage_name,
            "taskset": task.taskset,
            "task_id": task.task_id,
            "prompt": task.prompt,
            "answer": task.answer,
            "model": asked.model,
            "model_version": asked.version,
            "settings": probe.settings,
            "rollouts": tried.num_rollouts,
            "failed": tried.num_rollouts - len(tried.rewards),
            "passes": sum(reward > asked.pass_above for reward in tried.rewards),
            "rewards": list(tried.rewards),
            "requests": tried.requests,
            "tokens": tried.tokens,
            "error": tried.error,
        }
