"""Evaluation: held-out tasks, run with the current weights, as rows of `evals`.

An evaluation is written in one commit or not at all, and is not repeated after a restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import pyarrow.compute as pc

from trinity_data.config import ExplorerConfig, StageConfig
from trinity_data.dataset.reader import Source
from trinity_data.dataset.task import Task
from trinity_data.errors import NothingLearntError
from trinity_data.lease import Lease
from trinity_data.reporter import Metrics, Reporter, spread
from trinity_data.schema import content_id, rows_to_table
from trinity_data.stage_inputs import StageInputs
from trinity_data.store.protocol import WritableStore
from trinity_data.store.types import Commit
from trinity_explorer.engines.engine import Sampling
from trinity_explorer.failures import commonest_error
from trinity_explorer.rollout import Group, RolloutRunner, Row, outcome_of, sampling_of
from trinity_explorer.slots import RolloutEngines
from trinity_operators.registry import build_operators
from trinity_operators.stage_arguments import operators_of
from trinity_operators.task_engines import stage_models
from trinity_operators.task_filtering import read_for_evaluation

log = logging.getLogger(__name__)

SHOWN_CHARACTERS = 80


@dataclass(frozen=True)
class EvalSet:
    """A held-out task set and how it is sampled."""

    name: str
    tasks: Sequence[Task]
    sampling: Sampling
    repeat_times: int


class Evaluator:
    """Evaluates at the start of a stage, every `eval_interval` steps, and at its end, as configured."""

    def __init__(
        self,
        stage: StageConfig,
        eval_sets: Sequence[EvalSet],
        *,
        store: WritableStore,
        runner: RolloutRunner,
        reporter: Reporter,
        first_step: int,
        lease: Lease | None = None,
    ) -> None:
        """With a `lease` the explorer that has it evaluates, of those of the stage."""
        self.lease = lease
        self.stage, self.eval_sets = stage.stage_name, eval_sets
        self.config: ExplorerConfig = stage.explorer
        self.store, self.runner, self.reporter, self.first_step = store, runner, reporter, first_step
        self.engines = RolloutEngines(runner.slots, on_one_engine=False)
        self._read_evaluated_steps()

    def _read_evaluated_steps(self) -> None:
        steps = self.store.table("evals", columns=["step", "stage"], stage=self.stage)["step"]
        self._evaluated_steps = set(cast("list[int]", pc.unique(steps).to_pylist()))

    def has_evaluated(self, step: int) -> bool:
        """Whether the evaluation of a step is on record."""
        return step in self._evaluated_steps

    async def evaluates(self) -> bool:
        """Whether this explorer is the one that evaluates."""
        if not self.eval_sets:
            return False
        if self.lease is not None and not self.lease.is_held:
            if not await asyncio.to_thread(self.lease.take):
                return False
            # others may have evaluated before
            self._read_evaluated_steps()
        return True

    async def evaluate_if_due(self, step: int) -> None:
        """`step` is the one whose weights the engines hold.

        With a `sync_interval` they pass over some steps.
        """
        if not await self.evaluates():
            return
        if step == self.first_step - 1:
            due = self.config.eval_on_startup
        else:
            due = self._intervals(step) > self._intervals(max(self._evaluated_steps, default=0))
        if due:
            await self.evaluate(step)

    def _intervals(self, step: int) -> int:
        interval = self.config.eval_interval
        return max(0, step - self.first_step + 1) // interval if interval else 0

    async def evaluate(self, step: int) -> None:
        """Runs every task of every set, and reports accuracy and mean reward by set.

        NothingLearntError when every rollout of a set failed; nothing of the evaluation is stored then.
        """
        if not self.eval_sets or self.has_evaluated(step):
            return
        total = sum(len(eval_set.tasks) * eval_set.repeat_times for eval_set in self.eval_sets)
        self.reporter.status.begin_rollouts(total, activity="evaluating")
        rows = [row for eval_set in self.eval_sets for row in await self._run_set(eval_set, step)]
        await asyncio.wrap_future(self.store.submit(Commit(tables={"evals": rows_to_table("evals", rows)})))
        self._evaluated_steps.add(step)
        self.reporter.evaluated(step, _summary(rows, detailed=self.reporter.detailed))

    async def _run_set(self, eval_set: EvalSet, step: int) -> list[Row]:
        """The rollouts of a set; a failed one counts as wrong where others are measured."""
        async with asyncio.TaskGroup() as rollouts:
            running = [
                rollouts.create_task(self._run(eval_set, task, step, position, rollout))
                for position, task in enumerate(eval_set.tasks)
                for rollout in range(eval_set.repeat_times)
            ]
        rows = [task.result() for task in running]
        errors = [str(row["error"]) for row in rows]
        if rows and all(errors):
            commonest = commonest_error(errors)
            prompt = str(rows[commonest.example]["prompt"])[:SHOWN_CHARACTERS]
            message = f"evaluation of {eval_set.name!r} at step {step}: all {len(errors)} rollouts failed, "
            message += f"{commonest.times} with: {commonest.text}; one of its tasks: {prompt!r}"
            await asyncio.wrap_future(self.store.log_event(self.stage, step, "evaluation_failed", message))
            raise NothingLearntError(f"{message}; fix its cause and run the same command again")
        measured = any(row["accuracy"] is not None for row in rows)
        return [row | {"accuracy": 0.0} if measured and row["error"] else row for row in rows]

    async def _run(self, eval_set: EvalSet, task: Task, step: int, position: int, rollout: int) -> Row:
        """One rollout, as a row of `evals`."""
        name = f"eval/{eval_set.name}/{position:05d}"
        seed, repeat_times = int(content_id(name)[:7], 16), eval_set.repeat_times
        group = Group(name, self.stage, step, position, task, epoch=0, refill=0, repeat_times=repeat_times)
        with await self.engines.slot() as batcher:
            rows = await self.runner.run(
                group, rollout, batcher=batcher, sampling=eval_set.sampling, source={}, seed=seed
            )
        error, reward, accuracy = outcome_of(rows)
        self.reporter.status.count_rollout(error=error, reward=reward, accuracy=accuracy)
        columns = ("stage", "step", "rollout", "task_id", "response_text", "truncated", "error", "seconds")
        return {name: rows[-1][name] for name in columns} | {
            "model_version": self.runner.engines.model_version,
            "taskset": eval_set.name,
            "prompt": task.prompt,
            "answer": task.answer,
            "response_length": sum(int(str(row["response_length"])) for row in rows),
            "reward": reward,
            "accuracy": accuracy,
        }


def build_evaluator(
    stage: StageConfig,
    inputs: StageInputs,
    runner: RolloutRunner,
    *,
    store: WritableStore,
    reporter: Reporter,
    first_step: int,
    lease: Lease | None = None,
) -> Evaluator:
    """With the tasks of its sets, which go through the task operators; rows that are no task are an event."""
    eval_sets: list[EvalSet] = []
    for taskset in stage.buffer.explorer_input.eval_tasksets:
        source = Source(inputs.source_of(taskset))
        operators = build_operators(operators_of(stage, inputs), inputs.base_dir)
        tasks, left_out = read_for_evaluation(
            taskset, source, operators, stage=stage.stage_name, models=stage_models(stage.explorer)
        )
        if left_out:
            rows = f"{len(left_out)} of {source.num_rows} rows of {taskset.name!r}"
            message = f"{rows} cannot be tried: {left_out[0]}"
            log.warning("stage %s, evaluation: %s", stage.stage_name, message)
            store.log_event(stage.stage_name, first_step, "left_out", message).result()
        sampling = sampling_of(taskset.rollout_args, stage.model)
        eval_sets.append(EvalSet(taskset.name, tasks, sampling, taskset.repeat_times))
    return Evaluator(
        stage, eval_sets, store=store, runner=runner, reporter=reporter, first_step=first_step, lease=lease
    )


def _summary(rows: Sequence[Row], *, detailed: bool) -> Metrics:
    """By task set: accuracy of all rollouts, mean reward and length of those
    that did not fail, and how many failed.
    """
    metrics: dict[str, float] = {}
    for name in sorted({str(row["taskset"]) for row in rows}):
        mine = [row for row in rows if row["taskset"] == name]
        for column in ("accuracy", "reward", "response_length"):
            counted = [row for row in mine if column == "accuracy" or not row["error"]]
            values = [float(str(row[column])) for row in counted if row[column] is not None]
            if values:
                metrics[f"eval/{name}/{column}"] = sum(values) / len(values)
                metrics |= spread(f"eval/{name}/{column}", values) if detailed else {}
        metrics[f"eval/{name}/failed"] = float(sum(bool(row["error"]) for row in mine))
    return metrics
