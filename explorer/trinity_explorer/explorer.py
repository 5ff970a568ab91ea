"""The explore loop: tasks into groups, groups into rollouts, rollouts into the store.

Groups are recorded before their first rollout starts, so that a restart runs the same tasks
and only what is missing.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.config import ExplorerConfig, StageConfig
from trinity_data.config.run import SERVED
from trinity_data.reporter import LateGroups, Reporter, operator_metrics
from trinity_data.schema import TABLES, group_id, group_of, rows_to_table
from trinity_data.stage_inputs import StageInputs
from trinity_data.store.protocol import WritableStore
from trinity_data.store.types import Commit, State
from trinity_data.synchronizer import Synchronizer
from trinity_explorer.curriculum.build import build_mixer
from trinity_explorer.curriculum.history import tried_tasks
from trinity_explorer.curriculum.samplers import Sampler, TaskSource, Tried
from trinity_explorer.engine_model import EngineModel
from trinity_explorer.engines.pool import Usage
from trinity_explorer.evaluator import Evaluator, build_evaluator
from trinity_explorer.failures import FailureWatch
from trinity_explorer.group_runner import GroupRunner
from trinity_explorer.group_tasks import GroupTasks, stored_groups
from trinity_explorer.late_groups import Late
from trinity_explorer.policy_weights import PolicyWeights
from trinity_explorer.recomputation import StepRecomputation
from trinity_explorer.rollout import GROUP_COLUMNS, Group, RolloutRunner
from trinity_explorer.serve.sessions import Sessions
from trinity_explorer.serve.steps import SessionRollouts, SessionSampler
from trinity_explorer.steps import OwnSteps, Shared, Steps
from trinity_explorer.task_prober import TaskProber
from trinity_operators.base import Operator
from trinity_operators.contracts.step_contracts import StepContracts
from trinity_operators.counts import show_counts
from trinity_operators.endpoint import ROLLOUT_MODEL
from trinity_operators.experience_pipeline import ExperienceWriter, build_writer

_T = TypeVar("_T")


@dataclass
class RunningStep:
    """A step that was begun."""

    step: int
    groups: list[Group]
    """Its own, without those of earlier steps that are late."""
    since: tuple[float, Usage]
    """When it was begun, and what engines had done by then."""


class Explorer:
    """Explores a stage step by step, as fast as its synchronizer allows."""

    def __init__(
        self,
        stage: StageConfig,
        *,
        store: WritableStore,
        runner: RolloutRunner,
        tasks: Sampler,
        writer: ExperienceWriter,
        evaluator: Evaluator,
        steps: Steps,
        reporter: Reporter,
    ) -> None:
        self.stage, self.name = stage.stage_name, stage.explorer.name
        self.config: ExplorerConfig = stage.explorer
        self.batch_size = stage.buffer.batch_size
        self.repeat_times = {taskset.name: taskset.repeat_times for taskset in stage.explored_tasksets}
        self.store, self.runner, self.engines = store, runner, runner.engines
        self.tasks, self.writer, self.evaluator = tasks, writer, evaluator
        self.steps, self.synchronizer = steps, steps.synchronizer
        self.reporter, self.status = reporter, reporter.status
        self.weights = PolicyWeights(
            self.engines, self.synchronizer, store=store, stage=self.stage, status=self.status
        )
        self._has_tasks = True
        self.failures = FailureWatch(stage.explorer, store, reporter)
        self.contracts = StepContracts(
            stage.all_contracts,
            store,
            stage=self.stage,
            explorer=self.name,
            recompute=StepRecomputation(store, runner.workflow_for, seconds=runner.timeout_seconds),
        )
        self.groups = GroupRunner(stage, store=store, runner=runner, writer=writer, status=reporter.status)
        self.running = GroupTasks()
        self.late = Late(steps, self.running)
        self._under_way = set[int]()
        """Steps that were begun and have not ended."""
        self._last_step: int | None = None
        self._inflight = asyncio.Semaphore(stage.explorer.max_inflight_batches)
        self._ends: dict[int, asyncio.Task[None]] = {}
        """Of steps that were begun, where several may be."""
        self._ended = 0.0, self.engines.usage()

    async def explore(self, first_step: int, last_step: int | None, prober: TaskProber | None = None) -> None:
        """Runs until `last_step`, or until the tasks are used up.

        `prober` makes the rollouts that task operators ask for before the first step. A step may begin while
        `max_inflight_batches` - 1 others are not over; they end in their order.
        """
        self._last_step = last_step
        await self.writer.prepare()
        telling = asyncio.create_task(self.late.tell_when_whole())
        try:
            async with self.weights.taken_over():
                await self._explore_steps(first_step, last_step, prober)
        finally:
            for each in (ends := [telling, *self._ends.values()]):
                each.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
            await self.running.cancel()
            self.writer.pipeline.close()

    async def _explore_steps(self, first_step: int, last_step: int | None, prober: TaskProber | None) -> None:
        await self._resume(first_step)
        end: asyncio.Task[None] | None = None
        while True:
            beginning = self._begin_step(last_step, prober)
            running = await (beginning if end is None else _beside(end, beginning))
            if running is None:
                break
            # what is late then has no step to go to
            is_last = running.step == last_step or not running.groups
            ending = self._end_in_turn(running, end, is_last=is_last)
            if self.config.max_inflight_batches == 1:
                await ending
            else:
                end = self._ends[running.step] = asyncio.create_task(ending)
        if end is not None:
            await end
        await self.running.wait(lambda: not self.running.groups)
        await self.steps.end()
        await self.synchronizer.end_turn("explorer")

    async def _resume(self, first_step: int) -> None:
        """Goes on behind what is on record, with the groups that were late."""
        ended = first_step - 1
        self.groups.timeout.resume(
            self.store, self.stage, self.name, first_step=self.synchronizer.first_step, last_step=ended
        )
        tried = tried_tasks(self.store, self.stage)
        await self.tasks.resume(tried)
        await self.steps.resume(first_step, tried)
        self.writer.pipeline.ended_through = ended
        await self._take_late()

    async def _take_late(self) -> bool:
        """Goes on with groups that an earlier session, or an explorer that is gone, has left; False without
        any.
        """
        if not (ids := await self.steps.take_late()):
            return False
        recorded = await asyncio.to_thread(self.store.table, "groups", stage=self.stage)
        late = stored_groups(
            self.store, recorded.filter(pc.is_in(recorded["group_id"], pa.array(ids, pa.string())))
        )
        for group in late:
            self.writer.pipeline.expect_late(group.step, self._under_way)
        self.late.add(late)
        self._start(late)
        return True

    async def _next_step(self, last_step: int | None) -> int | None:
        """To be begun; None at the end."""
        while True:
            await self._take_late()
            step = await self.steps.next(last_step, has_tasks=self._has_tasks)
            if step is not None or not await self._take_late():
                return step

    async def _begin_step(self, last_step: int | None, prober: TaskProber | None) -> RunningStep | None:
        """Starts the groups of the next step as soon as it may be explored; None where none will be."""
        await self._inflight.acquire()
        while (step := await self._next_step(last_step)) is not None:
            version = self.synchronizer.required_version(step)
            if version in self._ends:
                # the trainer has no part in this wait
                await asyncio.shield(self._ends[version])
            is_taken = partial(self.steps.is_taken, step)
            if not await self.synchronizer.wait_to_explore(step, unless=is_taken):
                return None
            if not await self._has_room(step, last_step):
                return None
            if is_taken():
                continue
            await self.synchronizer.begin_turn("explorer")
            weights = await self.weights.load_before(step)
            async with self.weights.unchanged:
                await self.evaluator.evaluate_if_due(self.engines.model_version)
            if prober is not None:
                await prober.run(self.runner, weights, goes_on=self.synchronizer.still_exploring)
            if (running := await self._begin_groups(step, await self._begun_groups(step))) is not None:
                return running
        return None

    async def _begin_groups(self, step: int, begun: Sequence[Group]) -> RunningStep | None:
        """`begun` are the groups that are on record. None where another explorer was first, or where no tasks
        are left; late groups alone make a step too.
        """
        since = time.perf_counter(), self.engines.usage()
        if begun and not await self.steps.begin(step):
            return None
        groups = list(begun) or await self._new_groups(step, self.batch_size, first=0, refill=0)
        if not groups:
            if self._has_tasks:
                return None
            # what is left then is late
            for end in list(self._ends.values()):
                await asyncio.shield(end)
            if not self.running.groups or not await self.steps.begin(step):
                return None
        self.status.begin_rollouts(self.groups.num_running + sum(group.repeat_times for group in groups))
        self._start(groups)
        self._under_way.add(step)
        return RunningStep(step, groups, since)

    async def _end_in_turn(
        self, running: RunningStep, before: asyncio.Task[None] | None, *, is_last: bool
    ) -> None:
        """Ends a step when the one before has ended."""
        if before is not None:
            await before
        await self.synchronizer.finished_exploring(await self._end_step(running, is_last=is_last))
        self._ends.pop(running.step, None)
        self._inflight.release()

    async def evaluate_end(self, version: int) -> None:
        """The evaluation at the end of the stage, of weights that the trainer has published."""
        if await self.evaluator.evaluates():
            await self.synchronizer.begin_turn("explorer")
            await self.weights.load(version)
            await self.evaluator.evaluate(version)

    async def _has_room(self, step: int, last_step: int | None) -> bool:
        """Waits, with an event, while more rows wait than the buffer may hold.

        False when the trainer takes no more steps.
        """
        if message := self.synchronizer.excess():
            await asyncio.wrap_future(self.store.log_event(self.stage, step, "explorer_waits", message))
        return await self.synchronizer.wait_for_room(last_step)

    async def explore_step(self, step: int, begun: Sequence[Group] = ()) -> bool:
        """A step by itself, to its end; False when there were no tasks left for it."""
        running = await self._begin_groups(step, begun)
        if running is None:
            return False
        await self._end_step(running, is_last=True)
        return True

    async def _end_step(self, running: RunningStep, *, is_last: bool) -> int:
        """Returns the last step up to which all are over.

        ContractError where the step breaks a contract that stops the run; it is not over then.
        NothingLearntError when too many steps in a row have come to nothing; the step is over by then.
        """
        step, groups = running.step, running.groups
        await self._wait_for_groups(step, groups, is_last=is_last)
        while step == self._last_step and not await self.steps.wait_for_late_of_others():
            await self._take_late()
            await self._wait_for_groups(step, groups, is_last=is_last)
        first = self.engines.usage()
        await self._refill(step, groups, is_last=is_last)
        reported = self._group_metrics(groups, self.engines.usage().since(first))
        operators = await self.writer.end_step(step)
        self._under_way.discard(step)
        counts = show_counts(self.status, operators)
        tasks = {group.group_id: group.task for group in groups}
        async with self.late.recording:
            still_late = [group for group in self.running.groups if group.step not in self._under_way]
            late = self.late.end_step(step, still_late)
            enforced = await self.contracts.enforce(step, operators, tasks)
            commit = replace(enforced.commit, tables={**enforced.commit.tables, "operators": operators})
            explored = await self.steps.finish(step, commit, still_late)
        reported = {**operator_metrics(counts), **reported, **enforced.metrics}
        self._report(running, reported, late)
        self.groups.timeout.finish_step()
        await self.failures.check(step, self.writer.pipeline)
        return explored

    def _report(self, running: RunningStep, reported: Mapping[str, float], late: LateGroups) -> None:
        """Time and tokens since the step was begun, or since the one before has ended."""
        begun_at, before = max(running.since, self._ended, key=itemgetter(0))
        self._ended = now, usage = time.perf_counter(), self.engines.usage()
        seconds, used = now - begun_at, usage.since(before)
        self.status.tokens_per_second = used.tokens / seconds
        metrics = {
            "time/explore": seconds,
            "time/generate": used.busy_seconds,
            "rollout/tokens": float(used.tokens),
            "rollout/tokens_per_second": self.status.tokens_per_second,
            **reported,
        }
        if self.config.over_rollout.ratio:
            metrics |= late.metrics()
        if self.engines.difference is not None:
            metrics |= self.engines.difference.metrics()
        self.reporter.explored(running.step, metrics, late)

    async def _refill(self, step: int, groups: list[Group], *, is_last: bool) -> None:
        """Asks for more tasks while operators have left the step short of groups;
        not where every rollout has failed.
        """
        done = max((group.refill for group in groups), default=self.config.refill_rounds)
        for refill in range(done + 1, self.config.refill_rounds + 1):
            if self.failures.counts(step).all_failed:
                return
            # those that are late may be kept
            missing = (
                self.batch_size - self.writer.pipeline.kept_groups.get(step, 0) - self.running.left(step)
            )
            extra = await self._new_groups(step, missing, first=len(groups), refill=refill)
            if not extra:
                return
            groups += extra
            self.status.rollouts_total += sum(group.repeat_times for group in extra)
            self._start(extra)
            await self._wait_for_groups(step, groups, is_last=is_last)

    def _group_metrics(self, groups: Sequence[Group], refill: Usage) -> dict[str, float]:
        """The groups of each of several task sets, and what refills cost where there can be any."""
        metrics: dict[str, float] = {}
        if len(self.repeat_times) > 1:
            tried = Counter(group.task.taskset for group in groups)
            metrics = {f"taskset/{name}/groups": float(tried[name]) for name in self.repeat_times}
        if self.config.refill_rounds:
            refilled = [group for group in groups if group.refill]
            metrics["rollout/refill_rounds"] = float(max((group.refill for group in refilled), default=0))
            metrics["rollout/refill_number"] = float(sum(group.repeat_times for group in refilled))
            metrics["rollout/refill_tokens"] = float(refill.tokens)
        return metrics

    async def _new_groups(self, step: int, count: int, *, first: int, refill: int) -> list[Group]:
        """On record; none where there are no tasks left, or another explorer has begun the step."""
        while refill or not self.steps.is_taken(step):
            if (behind := self.steps.num_taken) is not None:
                self.tasks.go_on_behind(behind)
            taken = await self.tasks.take(count, step=step, refill=refill)
            groups = [
                Group(
                    group_id=group_id(self.name, self.stage, step, first + i),
                    stage=self.stage,
                    step=step,
                    position=first + i,
                    task=task,
                    epoch=epoch,
                    refill=refill,
                    repeat_times=self.repeat_times[task.taskset] if repeat_times is None else repeat_times,
                )
                for i, (task, epoch, repeat_times) in enumerate(taken)
            ]
            if not groups:
                self._has_tasks = self._has_tasks and (refill > 0 or self.steps.is_taken(step))
                return []
            if behind == self.steps.num_taken and await self._record(step, groups):
                return groups
            self.tasks.give_back(taken)
        return []

    async def _record(self, step: int, groups: Sequence[Group]) -> bool:
        """False where another explorer was first."""
        commit = Commit(tables={"groups": rows_to_table("groups", [group.row() for group in groups])})
        tried = [Tried(step, group.task.taskset, group.task.task_id) for group in groups]
        if groups[0].refill:
            return await self.steps.take(commit, tried)
        return await self.steps.begin(step, commit, taken=tried)

    async def _begun_groups(self, step: int) -> list[Group]:
        """Those that are on record, of an earlier session or of an explorer that is gone."""
        if not self.steps.is_begun(step):
            return []
        columns = [*GROUP_COLUMNS, "task_id", "round"]
        recorded = await asyncio.to_thread(
            self.store.of_steps, "groups", self.stage, step, step, columns=columns
        )
        groups = await asyncio.to_thread(stored_groups, self.store, recorded)
        if groups:
            self.writer.pipeline.resume_step(self.store, step, [group.group_id for group in groups])
        return groups

    def _start(self, groups: Sequence[Group]) -> None:
        """Runs what their steps do not have yet."""
        for step in dict.fromkeys(group.step for group in groups):
            mine = [group for group in groups if group.step == step]
            self.writer.pipeline.expect(step, sum(group.repeat_times for group in mine))
            stored = dict(self.store.group_progress(self.stage, step))
            for group in mine:
                self.running.start(group, self.groups.run(group, stored))

    async def _wait_for_groups(self, step: int, groups: Sequence[Group], *, is_last: bool) -> None:
        """Until so many of a step's groups are whole that it may end; at the last one, all."""
        running, over_rollout = self.running, self.config.over_rollout
        if is_last:
            await running.wait(lambda: not running.groups)
        elif over_rollout.ratio:
            most_late = over_rollout.most_late(len(groups))
            await running.wait(lambda: running.left(step) <= most_late)
            with suppress(TimeoutError):
                async with asyncio.timeout(over_rollout.wait_after_min):
                    await running.wait(lambda: not running.left(step))
        else:
            await running.wait(lambda: not running.left(step))
        if self.writer.pipeline.whole_steps:
            # together, but for those that passed through the pipeline before
            states, mine = self.store.group_progress(self.stage, step), {group.group_id for group in groups}
            raw = [row for row, state in states if state is State.RAW and group_of(row) in mine]
            if raw:
                await self.writer.add_stored(self.store.read(raw).select(TABLES["experiences"].names))


def build_explorer(
    stage: StageConfig,
    inputs: StageInputs,
    streams: Mapping[str, TaskSource],
    *,
    store: WritableStore,
    runner: RolloutRunner,
    operators: Sequence[Operator],
    synchronizer: Synchronizer,
    reporter: Reporter,
    sessions: Sessions | None = None,
    shared: Shared | None = None,
) -> Explorer:
    """The explorer of a stage with its evaluator, which may share the stage with other explorers.

    `streams` are of its task sets, by name, in whose place `sessions` may be; `operators` those of the
    experience pipeline, which may ask the auxiliary models as workflows may.
    """
    rollout_model = EngineModel(runner.engines, runner.template)
    for operator in operators:
        operator.connect_models({**runner.auxiliary_models, ROLLOUT_MODEL: rollout_model})
    own_steps = OwnSteps(store, stage.stage_name, synchronizer, explorer=stage.explorer.name)
    steps = own_steps if shared is None else shared.steps
    runner.made_elsewhere[SERVED] = SessionRollouts(runner.template, store, stage.stage_name, sessions)
    tasks: Sampler
    if sessions is None:
        tasks = build_mixer(stage, streams, store=store, synchronizer=synchronizer, seed=inputs.seed)
    else:
        tasks = SessionSampler(sessions, steps)
    return Explorer(
        stage,
        store=store,
        runner=runner,
        tasks=tasks,
        writer=build_writer(stage, operators, store),
        evaluator=build_evaluator(
            stage,
            inputs,
            runner,
            store=store,
            reporter=reporter,
            first_step=synchronizer.first_step,
            lease=None if shared is None else shared.evaluation,
        ),
        steps=steps,
        reporter=reporter,
    )


async def _beside(end: asyncio.Task[None], work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`; raises at once what the end of a step raises."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({end, task}, return_when=asyncio.FIRST_COMPLETED)
        if end.done():
            end.result()
        return await task
    finally:
        task.cancel()
