"""The explore loop: tasks into groups, groups into rollouts, rollouts into the store.

Groups are recorded before their first rollout starts, so that a restart runs the same tasks
and only what is missing.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.config import ExplorerConfig, StageConfig
from trinity_data.dataset.task import tasks_from_table
from trinity_data.errors import WrongModelError
from trinity_data.progress import explored_key
from trinity_data.reporter import Reporter, operator_metrics
from trinity_data.schema import TABLES, group_id, rows_to_table
from trinity_data.stage_inputs import StageInputs
from trinity_data.store.protocol import WritableStore
from trinity_data.store.types import Commit, State
from trinity_data.synchronizer import Synchronizer
from trinity_explorer.curriculum.build import build_mixer
from trinity_explorer.curriculum.history import groups_on_record, tried_tasks
from trinity_explorer.curriculum.samplers import Sampler, TaskSource
from trinity_explorer.engine_model import EngineModel
from trinity_explorer.engines.pool import Usage
from trinity_explorer.evaluator import Evaluator, build_evaluator
from trinity_explorer.failures import FailureWatch
from trinity_explorer.group_runner import GroupRunner
from trinity_explorer.recomputation import StepRecomputation
from trinity_explorer.rollout import Group, RolloutRunner
from trinity_explorer.task_prober import TaskProber
from trinity_operators.base import Operator
from trinity_operators.contracts.step_contracts import StepContracts
from trinity_operators.counts import show_counts
from trinity_operators.endpoint import ROLLOUT_MODEL
from trinity_operators.experience_pipeline import ExperienceWriter, build_writer


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
        synchronizer: Synchronizer,
        reporter: Reporter,
    ) -> None:
        tasksets = [taskset for _, taskset in stage.buffer.explorer_input.train_tasksets()]
        self.stage, self.name = stage.stage_name, stage.explorer.name
        self.config: ExplorerConfig = stage.explorer
        self.batch_size = stage.buffer.batch_size
        self.repeat_times = {taskset.name: taskset.repeat_times for taskset in tasksets}
        self.store, self.runner, self.engines = store, runner, runner.engines
        self.tasks, self.writer, self.evaluator = tasks, writer, evaluator
        self.synchronizer, self.reporter, self.status = synchronizer, reporter, reporter.status
        self.failures = FailureWatch(stage.explorer, store, reporter)
        self.contracts = StepContracts(
            stage.all_contracts,
            store,
            stage=self.stage,
            explorer=self.name,
            recompute=StepRecomputation(store, runner.workflow_for, seconds=runner.timeout_seconds),
        )
        self.groups = GroupRunner(stage, store=store, runner=runner, writer=writer, status=reporter.status)

    async def explore(self, first_step: int, last_step: int | None, prober: TaskProber | None = None) -> None:
        """Runs until `last_step`, or until the tasks are used up.

        `prober` makes the rollouts that task operators ask for before the first step.
        """
        await self.writer.prepare()
        try:
            recorded = groups_on_record(self.store, self.stage, self.name)
            self.groups.timeout.resume(
                self.store, self.stage, self.name,
                first_step=self.synchronizer.first_step, last_step=first_step - 1,
            )  # fmt: skip
            await self.tasks.resume(tried_tasks(self.store, self.stage, recorded))
            step = first_step
            while last_step is None or step <= last_step:
                if not await self.synchronizer.wait_to_explore(step) or not await self._has_room(
                    step, last_step
                ):
                    break
                version = self.synchronizer.required_version(step)
                # an equal version may lie in another folder, as that of the stage before
                if version >= self.engines.model_version:
                    await self._load(version)
                await self.evaluator.evaluate_if_due(self.engines.model_version)
                if prober is not None:
                    weights = self.synchronizer.weights_of(version)
                    await prober.run(self.runner, weights, goes_on=self.synchronizer.still_exploring)
                begun = self._begun_groups(recorded, step) if step == first_step else []
                if not await self.explore_step(step, begun):
                    break
                await self.synchronizer.finished_exploring(step)
                step += 1
            await self.synchronizer.no_more_steps(step - 1)
        finally:
            self.writer.pipeline.close()

    async def evaluate_end(self, version: int) -> None:
        """The evaluation at the end of the stage, of weights that the trainer has published."""
        await self._load(version)
        await self.evaluator.evaluate(version)

    async def _has_room(self, step: int, last_step: int | None) -> bool:
        """Waits, with an event, while more rows wait than the buffer may hold.

        False when the trainer takes no more steps.
        """
        self.status.waits_for = self.synchronizer.excess()
        if message := self.status.waits_for:
            await asyncio.wrap_future(self.store.log_event(self.stage, step, "explorer_waits", message))
        try:
            return await self.synchronizer.wait_for_room(last_step)
        finally:
            self.status.waits_for = ""

    async def _load(self, version: int) -> None:
        """The weights of `version` for the engines; where they do not arrive as they were trained,
        that is an event, and the end.
        """
        weights = self.synchronizer.weights_of(version)
        try:
            await self.engines.load_weights(weights)
        except WrongModelError as error:
            event = self.store.log_event(self.stage, weights.version, "wrong_model", str(error))
            await asyncio.wrap_future(event)
            raise
        await self.synchronizer.finished_loading(self.engines.model_version)
        self.status.engine_version = self.engines.model_version

    async def explore_step(self, step: int, begun: Sequence[Group] = ()) -> bool:
        """False when there were no tasks left for it. `begun` are the groups a killed run had recorded.

        ContractError where the step breaks a contract that stops the run; it is not over then.
        NothingLearntError when too many steps in a row have come to nothing; the step is over by then.
        """
        started, before = time.perf_counter(), self.engines.usage()
        groups = list(begun) or await self._new_groups(step, self.batch_size, first=0, refill=0)
        if not groups:
            return False
        self.status.begin_rollouts(sum(group.repeat_times for group in groups))
        await self._run_groups(groups)
        first = self.engines.usage()
        await self._refill(step, groups)
        reported = self._group_metrics(groups, self.engines.usage().since(first))
        operators = self.writer.pipeline.counts_table(step)
        counts = show_counts(self.status, operators)
        tasks = {group.group_id: group.task for group in groups}
        enforced = await self.contracts.enforce(step, operators, tasks)
        commit = replace(
            enforced.commit,
            tables={**enforced.commit.tables, "operators": operators},
            progress={explored_key(self.stage): step},
        )
        await asyncio.wrap_future(self.store.submit(commit))
        reported = {**operator_metrics(counts), **reported, **enforced.metrics}
        self._report(step, time.perf_counter() - started, before, reported)
        self.groups.timeout.finish_step()
        await self.failures.check(step, self.writer.pipeline)
        return True

    def _report(self, step: int, seconds: float, before: Usage, reported: Mapping[str, float]) -> None:
        used = self.engines.usage().since(before)
        self.status.tokens_per_second = used.tokens / seconds
        metrics = {
            "time/explore": seconds,
            "time/generate": used.busy_seconds,
            "rollout/tokens": float(used.tokens),
            "rollout/tokens_per_second": self.status.tokens_per_second,
            **reported,
        }
        if self.engines.difference is not None:
            metrics |= self.engines.difference.metrics()
        self.reporter.explored(step, metrics)

    async def _refill(self, step: int, groups: list[Group]) -> None:
        """Asks for more tasks while operators have left the step short of groups;
        not where every rollout has failed.
        """
        for refill in range(max(g.refill for g in groups) + 1, self.config.refill_rounds + 1):
            if self.failures.counts(step).all_failed:
                return
            missing = self.batch_size - self.writer.pipeline.kept_groups.get(step, 0)
            extra = await self._new_groups(step, missing, first=len(groups), refill=refill)
            if not extra:
                return
            groups += extra
            self.status.rollouts_total += sum(group.repeat_times for group in extra)
            await self._run_groups(extra)

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
                repeat_times=self.repeat_times[task.taskset],
            )
            for i, (task, epoch) in enumerate(taken)
        ]
        if groups:
            table = rows_to_table("groups", [group.row() for group in groups])
            await asyncio.wrap_future(self.store.submit(Commit(tables={"groups": table})))
        return groups

    def _begun_groups(self, recorded: pa.Table, step: int) -> list[Group]:
        rows = recorded.filter(pc.equal(recorded["step"], pa.scalar(step))).to_pylist()
        if not rows:
            return []
        self.writer.pipeline.count_stored(self.store, step, explorer=self.name)
        tasks = self.store.table("tasks", stage=self.stage)
        tasks = tasks.filter(pc.is_in(tasks["task_id"], pa.array([row["task_id"] for row in rows])))
        by_id = {task.task_id: task for task in tasks_from_table(tasks)}
        return [Group.from_row(row, by_id[row["task_id"]]) for row in rows]

    async def _run_groups(self, groups: Sequence[Group]) -> None:
        step = groups[0].step
        self.writer.pipeline.expect(step, sum(group.repeat_times for group in groups))
        stored = dict(self.store.group_progress(self.stage, step))
        async with asyncio.TaskGroup() as running:
            for group in groups:
                running.create_task(self.groups.run(group, stored))
        if self.writer.pipeline.whole_steps:
            # together, but for those that passed through the pipeline before
            states = self.store.group_progress(self.stage, step)
            raw = [row for row, state in states if state is State.RAW and row.startswith(f"{self.name}/")]
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
) -> Explorer:
    """The explorer of a stage with its evaluator.

    `streams` are of its task sets, by name; `operators` those of the experience pipeline, which may ask the
    auxiliary models as workflows may.
    """
    rollout_model = EngineModel(runner.engines, runner.template)
    for operator in operators:
        operator.connect_models({**runner.auxiliary_models, ROLLOUT_MODEL: rollout_model})
    return Explorer(
        stage,
        store=store,
        runner=runner,
        tasks=build_mixer(stage, streams, store=store, synchronizer=synchronizer, seed=inputs.seed),
        writer=build_writer(stage, operators, store),
        evaluator=build_evaluator(
            stage,
            inputs,
            runner,
            store=store,
            reporter=reporter,
            first_step=synchronizer.first_step,
        ),
        synchronizer=synchronizer,
        reporter=reporter,
    )
