"""Rollouts of tasks before the first step of a stage, for task operators, as rows of `task_probes`.

What is on record for the same model, asked in the same way, is not asked again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from trinity_data.config import StageConfig
from trinity_data.dataset.row import columns_text
from trinity_data.dataset.task import Task
from trinity_data.errors import OperatorError, StoreError
from trinity_data.schema import content_id, rows_to_table
from trinity_data.status import Status
from trinity_data.store.sql import open_sql
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_data.weights import Weights
from trinity_explorer.chat import RequestBatcher
from trinity_explorer.engines.engine import Completion, CompletionSource, Request
from trinity_explorer.rollout import Group, RolloutRunner, Row, sampling_of
from trinity_operators.task_rollouts import TriedTask

log = logging.getLogger(__name__)

_ON_RECORD = "SELECT probe, rollouts, rewards FROM task_probes"
_SEED_DIGITS = 7


@dataclass(frozen=True)
class _Asked:
    """What an operator wants to know, and of whom."""

    runner: RolloutRunner
    model: str
    version: int
    num_rollouts: int
    pass_above: float


class TaskProber:
    """Of one stage. Made in the loop of the engines, asked from the threads of task streams."""

    def __init__(
        self,
        stage: StageConfig,
        store: Store,
        status: Status,
        *,
        settings_of: Callable[[Task], Mapping[str, Any]],
        digest_of: Callable[[Weights], str],
    ) -> None:
        """`settings_of` is all that decides what a rollout of a task comes to, but for the model and the
        task's row; `digest_of` the model's part.
        """
        self.stage, self.config, self.store, self.status = stage, stage.explorer, store, status
        self.settings_of, self.digest_of = settings_of, digest_of
        self.slots = asyncio.Semaphore(self.num_slots)
        self._tasksets = {each.name: each for _, each in stage.buffer.explorer_input.train_tasksets()}
        self._loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[tuple[RolloutRunner, Weights]] = self._loop.create_future()
        self._streams: list[Callable[[], Awaitable[None]]] = []
        self._waiting = set[Future[list[TriedTask]]]()
        self._goes_on: Callable[[], Awaitable[None]] | None = None
        self._closed = False

    @property
    def num_slots(self) -> int:
        """Rollouts at a time."""
        return self.config.runner_per_model * self.config.rollout_model.engine_num

    def wait_for(self, ended: Callable[[], Awaitable[None]]) -> None:
        """`ended` waits for the end of a task stream whose operators ask for rollouts."""
        self._streams.append(ended)

    async def run(
        self, runner: RolloutRunner, weights: Weights, *, goes_on: Callable[[], Awaitable[None]]
    ) -> None:
        """Makes what operators ask for, with these weights; returns when they will ask for no more.

        `goes_on` is called whenever a task has ended.
        """
        if not self._opened.done():
            self._goes_on = goes_on
            self._opened.set_result((runner, weights))
        for ended in self._streams:
            await ended()

    def close(self) -> None:
        """An operator that waits fails."""
        self._closed = True
        for waiting in list(self._waiting):
            waiting.cancel()

    def attempt(
        self, tasks: Sequence[Task], *, num_rollouts: int, pass_above: float, runs: Sequence[Path]
    ) -> list[TriedTask]:
        """As of `TaskRollouts`; not to be called in the loop."""
        if self._closed:
            raise OperatorError("the stage ends")
        work = self._attempt(tasks, num_rollouts, pass_above, runs)
        waiting = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._waiting.add(waiting)
        try:
            return waiting.result()
        finally:
            self._waiting.discard(waiting)

    async def _attempt(
        self, tasks: Sequence[Task], num_rollouts: int, pass_above: float, runs: Sequence[Path]
    ) -> list[TriedTask]:
        runner, weights = await asyncio.shield(self._opened)
        model = await asyncio.to_thread(self.digest_of, weights)
        asked = _Asked(runner, model, weights.version, num_rollouts, pass_above)
        keys = [self._key(task, model) for task in tasks]
        tried = await asyncio.to_thread(self._on_record, set(keys), num_rollouts, runs)
        missing = {key: task for key, task in zip(keys, tasks, strict=True) if key not in tried}
        self.status.begin_rollouts(len(missing) * num_rollouts)
        self.status.activity = "trying tasks"
        started, on_record = time.perf_counter(), len(tried)
        waiting = iter(missing.items())

        async def work() -> None:
            for key, task in waiting:
                tried[key] = await self._try(key, task, asked)

        # a task each at a time, so that a large set has no more of them under way than rollouts
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.num_slots, len(missing))):
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

    def _key(self, task: Task, model: str) -> str:
        settings = json.dumps(self.settings_of(task), sort_keys=True)
        return content_id(model, settings, task.messages, task.answer, columns_text(task.columns))

    def _on_record(self, keys: set[str], num_rollouts: int, runs: Sequence[Path]) -> dict[str, TriedTask]:
        """By key, of this run and of others, what had as many rollouts and not only failed ones."""
        tables = [self.store.table("task_probes", columns=["probe", "rollouts", "rewards"])]
        for run in runs:
            try:
                with open_sql([run], timeout_seconds=None) as session:
                    tables.append(session.query(_ON_RECORD))
            except StoreError as error:
                log.warning("pass rates that %s has on record cannot be read: %s", run, error)
        return {
            row["probe"]: TriedTask(tuple(row["rewards"]))
            for table in tables
            for row in table.to_pylist()
            if row["probe"] in keys and row["rollouts"] >= num_rollouts and row["rewards"]
        }

    async def _try(self, key: str, task: Task, asked: _Asked) -> TriedTask:
        """Rollouts of one task, whose row is durable when it returns."""
        started, engines = time.perf_counter(), _CountedRequests(asked.runner.engines)
        batcher, sampling = (
            RequestBatcher(engines),
            sampling_of(self._tasksets[task.taskset].rollout_args, self.stage.model),
        )
        group = Group(
            f"probe/{key}", self.stage.stage_name, asked.version, 0, task,
            epoch=0, refill=0, repeat_times=asked.num_rollouts,
        )  # fmt: skip

        async def run(rollout: int) -> Row:
            async with self.slots:
                rows = await asked.runner.run(
                    group, rollout, batcher=batcher, sampling=sampling,
                    source={}, seed=int(key[:_SEED_DIGITS], 16),
                )  # fmt: skip
            last = rows[-1]
            reward = cast("float | None", last.get("reward"))
            self.status.count_rollout(error=str(last["error"]), reward=reward, accuracy=None)
            return last

        rows = await asyncio.gather(*map(run, range(asked.num_rollouts)))
        errors = [str(row["error"]) for row in rows if row["error"]]
        tried = TriedTask(
            tuple(float(str(row["reward"])) for row in rows if not row["error"]),
            errors[0] if errors else "",
            requests=engines.requests, tokens=engines.tokens, num_rollouts=asked.num_rollouts,
        )  # fmt: skip
        row = self._row(key, task, asked, tried) | {"seconds": time.perf_counter() - started}
        commit = Commit(tables={"task_probes": rows_to_table("task_probes", [row])})
        await asyncio.wrap_future(self.store.submit(commit))
        if self._goes_on is not None:
            await self._goes_on()
        return tried

    def _row(self, key: str, task: Task, asked: _Asked, tried: TriedTask) -> Row:
        return {
            "probe": key,
            "at": datetime.now(UTC),
            "stage": self.stage.stage_name,
            "taskset": task.taskset,
            "task_id": task.task_id,
            "prompt": task.prompt,
            "answer": task.answer,
            "model": asked.model,
            "model_version": asked.version,
            "settings": json.dumps(self.settings_of(task), sort_keys=True),
            "rollouts": tried.num_rollouts,
            "failed": tried.num_rollouts - len(tried.rewards),
            "passes": sum(reward > asked.pass_above for reward in tried.rewards),
            "rewards": list(tried.rewards),
            "requests": tried.requests,
            "tokens": tried.tokens,
            "error": tried.error,
        }


class _CountedRequests:
    """The engines as one task sees them, with what it asks of them, failed rollouts included."""

    def __init__(self, engines: CompletionSource) -> None:
        self.engines, self.name = engines, engines.name
        self.requests = self.tokens = 0

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        completions = await self.engines.generate(requests)
        self.requests += len(requests)
        self.tokens += sum(len(request.prompt_token_ids) for request in requests)
        self.tokens += sum(len(completion.token_ids) for completion in completions)
        return completions
