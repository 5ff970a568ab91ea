"""The explore loop: tasks into groups, groups into rollouts, rollouts into the store.

Groups are recorded before their first rollout starts, so that a restart tries the same tasks
and only what is missing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import cast

import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.config import ModelConfig, RolloutArgs, StageConfig
from trinity_data.dataset.task import Task, tasks_from_table
from trinity_data.errors import WrongModelError
from trinity_data.progress import explored_key
from trinity_data.schema import TABLES, experience_id, group_id, rows_to_table
from trinity_data.status import Status
from trinity_data.store.store import Store
from trinity_data.store.types import Commit, State
from trinity_data.synchronizer import Synchronizer
from trinity_data.tokenizer import ChatTemplate
from trinity_data.weights import WeightFolders, Weights
from trinity_explorer.chat import ChatClient, RequestBatcher
from trinity_explorer.engines.engine import Sampling
from trinity_explorer.engines.pool import EnginePool, Usage
from trinity_explorer.evaluator import Evaluator
from trinity_explorer.experience_writer import ExperienceWriter
from trinity_explorer.failures import FailureWatch
from trinity_explorer.rollout import Group, Limits, Row, run_rollout
from trinity_explorer.task_sampler import TaskSampler
from trinity_explorer.workflows.workflow import Workflow
from trinity_operators.base import Operator
from trinity_operators.experience_pipeline import ExperiencePipeline


@dataclass(frozen=True)
class ExploreSettings:
    """The numbers of a stage that the loop needs."""

    explorer: str
    stage: str
    batch_size: int
    repeat_times: int
    refill_rounds: int
    concurrency: int
    """Rollouts at a time."""
    limits: Limits
    sampling: Sampling
    seed: int
    max_failed_steps: int = 1
    max_dropped_steps: int | None = None
    operator_timeout: float = 600.0


def explore_settings(stage: StageConfig, seed: int) -> ExploreSettings:
    """Reads them out of the stage's configuration."""
    taskset, explorer = stage.buffer.explorer_input.taskset, stage.explorer
    assert taskset is not None
    return ExploreSettings(
        explorer=explorer.name,
        stage=stage.stage_name,
        batch_size=stage.buffer.batch_size,
        repeat_times=taskset.repeat_times,
        refill_rounds=explorer.refill_rounds,
        concurrency=explorer.runner_per_model * explorer.rollout_model.engine_num,
        limits=Limits(explorer.max_timeout, explorer.max_retry_times),
        sampling=replace(sampling_of(taskset.rollout_args, stage.model), reports_cuts=True),
        seed=seed,
        max_failed_steps=explorer.max_failed_steps,
        max_dropped_steps=explorer.max_dropped_steps,
        operator_timeout=stage.data_processor.experience_pipeline.operator_timeout,
    )


def sampling_of(args: RolloutArgs, model: ModelConfig) -> Sampling:
    """How a task set is sampled, but for the seed."""
    return Sampling(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        # the end token counts as one, so 1 asks for nothing and leaves the distribution as it is
        min_tokens=model.min_response_tokens if model.min_response_tokens > 1 else 0,
        max_tokens=args.max_tokens,
        seed=0,
    )


class Explorer:
    """Explores a stage step by step, as fast as `pace` allows."""

    def __init__(
        self,
        settings: ExploreSettings,
        *,
        store: Store,
        engines: EnginePool,
        template: ChatTemplate,
        tasks: TaskSampler,
        operators: Sequence[Operator],
        workflow_for: Callable[[Task], Workflow],
        evaluator: Evaluator,
        pace: Synchronizer,
        weights_of: Callable[[int], Weights],
        folders: WeightFolders,
        status: Status,
    ) -> None:
        self.settings, self.store, self.engines, self.template = settings, store, engines, template
        self.tasks, self.workflow_for, self.evaluator = tasks, workflow_for, evaluator
        self.pace, self.weights_of = pace, weights_of
        self.folders, self.status = folders, status
        self.recorder = ExperienceWriter(
            store,
            ExperiencePipeline(operators, settings.stage),
            explorer=settings.explorer,
            operator_timeout=settings.operator_timeout,
        )
        self.failures = FailureWatch(
            store,
            settings.stage,
            explorer=settings.explorer,
            max_failed_steps=settings.max_failed_steps,
            max_dropped_steps=settings.max_dropped_steps,
        )
        self.slots = asyncio.Semaphore(settings.concurrency)
        self._step_metrics: dict[int, dict[str, float]] = {}

    async def explore(self, first_step: int, last_step: int | None) -> None:
        """Runs until `last_step`, or until the tasks are used up."""
        await self.recorder.replay_state()
        recorded = self.store.table("groups", stage=self.settings.stage)
        # other explorers may write into the same stage
        recorded = recorded.filter(pc.starts_with(recorded["group_id"], f"{self.settings.explorer}/"))
        await self.tasks.skip(recorded.num_rows)
        step = first_step
        while last_step is None or step <= last_step:
            await self.pace.wait_to_explore(step)
            if not await self._has_room(step, last_step):
                break
            await self._take_weights(step)
            await self.evaluator.evaluate_if_due(self.engines.model_version)
            begun = self._begun_groups(recorded, step) if step == first_step else []
            if not await self.explore_step(step, begun):
                break
            await self.pace.finished_exploring(step)
            step += 1
        await self.pace.no_more_steps(step - 1)

    async def _has_room(self, step: int, last_step: int | None) -> bool:
        """Waits, and says so, while more rows wait than the buffer may hold.

        False when no step is wanted any more.
        """
        self.status.waits_for = self.pace.excess()
        if self.status.waits_for:
            event: dict[str, object] = {
                "at": datetime.now(UTC),
                "stage": self.settings.stage,
                "step": step,
                "kind": "explorer_waits",
                "message": self.status.waits_for,
            }
            tables = {"events": rows_to_table("events", [event])}
            await asyncio.wrap_future(self.store.submit(Commit(tables=tables)))
        try:
            return await self.pace.wait_for_room(last_step)
        finally:
            self.status.waits_for = ""

    async def explore_step(self, step: int, begun: Sequence[Group] = ()) -> bool:
        """False when there were no tasks left for it. `begun` are the groups a killed run had recorded.

        NothingLearntError when too many steps in a row have come to nothing; the step is over by then.
        """
        started, before = time.perf_counter(), self.engines.usage()
        groups = list(begun) or await self._new_groups(step, self.settings.batch_size, first=0, refill=0)
        if not groups:
            return False
        self.status.begin_rollouts(len(groups) * self.settings.repeat_times)
        await self._run_groups(groups)
        await self._refill(step, groups)
        await self._close_step(step)
        self._measure(step, time.perf_counter() - started, before)
        await self.failures.look_at(
            step,
            kept_groups=self.recorder.pipeline.kept_groups.get(step, 0),
            operators=self.recorder.pipeline.counts(step),
        )
        return True

    def _measure(self, step: int, seconds: float, before: Usage) -> None:
        used = self.engines.usage().since(before)
        self.status.tokens_per_second = used.tokens / seconds
        self._step_metrics[step] = {
            "time/explore": seconds,
            "time/generate": used.busy_seconds,
            "rollout/tokens": float(used.tokens),
            "rollout/tokens_per_second": self.status.tokens_per_second,
        }
        if self.engines.difference is not None:
            self._step_metrics[step] |= self.engines.difference.metrics()

    def step_metrics(self, step: int) -> dict[str, float]:
        """What became of its rollouts, and times and rates where it was explored in this session."""
        return self._step_metrics.pop(step, {}) | self.failures.tries(step).metrics()

    async def _refill(self, step: int, groups: list[Group]) -> None:
        """Asks for more tasks while operators have left the step short of groups;
        not where every rollout has failed.
        """
        for refill in range(max(g.refill for g in groups) + 1, self.settings.refill_rounds + 1):
            if self.failures.tries(step).all_failed:
                return
            missing = self.settings.batch_size - self.recorder.pipeline.kept_groups.get(step, 0)
            extra = await self._new_groups(step, missing, first=len(groups), refill=refill)
            if not extra:
                return
            groups += extra
            self.status.rollouts_total += len(extra) * self.settings.repeat_times
            await self._run_groups(extra)

    async def _close_step(self, step: int) -> None:
        operators = self.recorder.pipeline.counts_table(step)
        for row in operators.to_pylist():
            self.status.count_operator(row["operator"], row["rows_in"], row["rows_out"])
        progress = {explored_key(self.settings.stage): step}
        await asyncio.wrap_future(
            self.store.submit(Commit(tables={"operators": operators}, progress=progress))
        )

    async def _take_weights(self, step: int) -> None:
        wanted = self.pace.rule.needs(step)
        if wanted > self.engines.model_version:
            await self.load(self.weights_of(wanted))

    async def load(self, weights: Weights) -> None:
        """New weights for the engines; where they do not arrive as they were trained,
        that is an event, and the end.
        """
        try:
            await self.engines.load_weights(weights)
        except WrongModelError as error:
            event: dict[str, object] = {
                "at": datetime.now(UTC),
                "stage": self.settings.stage,
                "step": weights.version,
                "kind": "wrong_model",
                "message": str(error),
            }
            tables = {"events": rows_to_table("events", [event])}
            await asyncio.wrap_future(self.store.submit(Commit(tables=tables)))
            raise
        self.folders.remove(before=self.engines.model_version)
        self.status.engine_version = self.engines.model_version

    async def _new_groups(self, step: int, count: int, *, first: int, refill: int) -> list[Group]:
        taken: list[tuple[Task, int]] = []
        while len(taken) < count and (handed_out := await self.tasks.next()) is not None:
            taken.append(handed_out)
        settings = self.settings
        groups = [
            Group(
                group_id=group_id(settings.explorer, settings.stage, step, first + i),
                stage=settings.stage,
                step=step,
                position=first + i,
                task=task,
                epoch=epoch,
                refill=refill,
                repeat_times=settings.repeat_times,
            )
            for i, (task, epoch) in enumerate(taken)
        ]
        if groups:
            table = rows_to_table("groups", [group.row() for group in groups])
            await asyncio.wrap_future(self.store.submit(Commit(tables={"groups": table})))
        return groups

    def _begun_groups(self, recorded: pa.Table, step: int) -> list[Group]:
        rows = recorded.filter(pc.equal(recorded["step"], step)).to_pylist()
        if not rows:
            return []
        self.recorder.pipeline.count_stored(self.store, step, id_prefix=f"{self.settings.explorer}/")
        known = self.store.table("tasks", stage=self.settings.stage)
        wanted = known.filter(pc.is_in(known["task_id"], pa.array([row["task_id"] for row in rows])))
        tasks = {task.task_id: task for task in tasks_from_table(wanted)}
        return [Group.from_row(row, tasks[row["task_id"]]) for row in rows]

    async def _run_groups(self, groups: Sequence[Group]) -> None:
        stored = dict(self.store.group_progress(self.settings.stage, groups[0].step))
        async with asyncio.TaskGroup() as running:
            for group in groups:
                running.create_task(self._run_group(group, stored))
        if self.recorder.pipeline.whole_steps:
            await self._run_on_step(groups[0].step)

    async def _run_on_step(self, step: int) -> None:
        """Passes the groups of a step through the pipeline together, but for those that passed before."""
        states = self.store.group_progress(self.settings.stage, step)
        mine = f"{self.settings.explorer}/"
        waiting = [row_id for row_id, state in states if state is State.RAW and row_id.startswith(mine)]
        if waiting:
            await self.recorder.add_stored(self.store.read(waiting).select(TABLES["experiences"].names))

    async def _run_group(self, group: Group, stored: Mapping[str, State]) -> None:
        ids = [experience_id(group.group_id, rollout) for rollout in range(group.repeat_times)]
        missing = [rollout for rollout, row_id in enumerate(ids) if row_id not in stored]
        whole = len(missing) == group.repeat_times and not self.recorder.pipeline.whole_steps
        rows = await self._run_rollouts(group, missing, completes_group=whole)
        if not whole and not self.recorder.pipeline.whole_steps:
            await self._run_on_stored(group, stored, rows)
        # those that a killed run had tried
        self.status.rollouts_done += group.repeat_times - len(missing)

    async def _run_rollouts(
        self, group: Group, rollouts: Sequence[int], *, completes_group: bool
    ) -> list[Row]:
        """Runs the tries and stores each as it ends.

        With `completes_group`, the last one is stored together with the pipeline's rows about the group.
        """
        workflow, batcher, group_rows = (
            self.workflow_for(group.task),
            RequestBatcher(self.engines),
            list[Row](),
        )
        left = len(rollouts)

        async def one(rollout: int) -> None:
            nonlocal left
            async with self.slots:
                rows = await run_rollout(
                    group,
                    rollout,
                    workflow=workflow,
                    build_model=lambda seed: ChatClient(
                        batcher, self.template, self.settings.sampling.with_seed(seed)
                    ),
                    limits=self.settings.limits,
                    seed=self.settings.seed,
                    source={"explorer": self.settings.explorer, "engine": self.engines.name},
                )
            group_rows.extend(rows)
            self._show(rows[-1])
            left -= 1
            if left == 0 and completes_group:
                group_rows.sort(key=lambda row: str(row["experience_id"]))
                await self.recorder.add_group(rows, group_rows)
                return
            self.recorder.add(rows)
            if left == 0:
                await self.recorder.flushed()

        async with asyncio.TaskGroup() as tries:
            for rollout in rollouts:
                tries.create_task(one(rollout))
        return group_rows

    def _show(self, last: Row) -> None:
        """Counts a try for the view by its last row, which holds its reward, metrics and error."""
        reward = cast("float | None", last.get("reward"))
        metrics = cast("list[tuple[str, float]]", last.get("metrics") or [])
        self.status.count_rollout(
            error=str(last["error"]),
            reward=reward,
            accuracy=dict(metrics).get("accuracy"),
        )

    async def _run_on_stored(self, group: Group, stored: Mapping[str, State], rows: Sequence[Row]) -> None:
        """Passes a group through the pipeline that a killed run had begun, unless it has its outcomes."""
        before = [row_id for row_id, state in stored.items() if row_id.startswith(f"{group.group_id}/")]
        if rows or any(stored[row_id] is State.RAW for row_id in before):
            ids = sorted([*before, *(str(row["experience_id"]) for row in rows)])
            await self.recorder.add_stored(self.store.read(ids).select(TABLES["experiences"].names))
