"""Evaluation: held-out tasks, tried by the current weights, as rows of `evals`.

An evaluation is written in one commit or not at all, and is not repeated after a restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import pyarrow.compute as pc

from trinity_data.dataset.task import Task
from trinity_data.errors import NothingLearntError
from trinity_data.schema import content_id, rows_to_table
from trinity_data.status import Status
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_data.tokenizer import ChatTemplate
from trinity_explorer.chat import ChatClient, RequestBatcher
from trinity_explorer.engines.engine import Sampling
from trinity_explorer.engines.pool import EnginePool
from trinity_explorer.failures import commonest_error
from trinity_explorer.rollout import Group, Limits, Row, run_rollout
from trinity_explorer.workflows.workflow import Workflow

log = logging.getLogger(__name__)

EvalMetrics = Mapping[str, float]

# of each engine: a try that waits its turn must not use up its deadline
TRIES_AT_A_TIME = 256
SHOWN_CHARACTERS = 80


@dataclass(frozen=True)
class EvalSet:
    """A held-out task set and how it is sampled."""

    name: str
    tasks: Sequence[Task]
    sampling: Sampling
    repeat_times: int


class Evaluator:
    """Evaluates at the start of a stage, every `interval` steps, and at its end, as configured."""

    def __init__(
        self,
        eval_sets: Sequence[EvalSet],
        *,
        stage: str,
        store: Store,
        engines: EnginePool,
        template: ChatTemplate,
        workflow_for: Callable[[Task], Workflow],
        limits: Limits,
        first_step: int,
        interval: int | None,
        on_startup: bool,
        on_result: Callable[[int, EvalMetrics], None],
        status: Status,
    ) -> None:
        self.eval_sets, self.stage, self.store, self.engines = eval_sets, stage, store, engines
        self.template, self.workflow_for, self.limits = template, workflow_for, limits
        self.first_step, self.interval, self.on_startup = first_step, interval, on_startup
        self.on_result, self.status = on_result, status
        self.batcher = RequestBatcher(engines)
        self.slots = asyncio.Semaphore(TRIES_AT_A_TIME * len(engines.engines))
        self._done = self._evaluated_steps()

    def _evaluated_steps(self) -> set[int]:
        return set(
            pc.unique(
                self.store.table("evals", columns=["step", "stage"], stage=self.stage)["step"]
            ).to_pylist()
        )

    async def evaluate_if_due(self, step: int) -> None:
        """`step` is the one whose weights the engines hold.

        With a `sync_interval` they pass over some steps.
        """
        at_start = step == self.first_step - 1
        if (
            self.on_startup
            if at_start
            else self._intervals(step) > self._intervals(max(self._done, default=0))
        ):
            await self.evaluate(step)

    def _intervals(self, step: int) -> int:
        return max(0, step - self.first_step + 1) // self.interval if self.interval else 0

    async def evaluate(self, step: int) -> None:
        """Tries every task of every set, and reports accuracy and mean reward by set.

        NothingLearntError when every try of a set failed; nothing of the evaluation is stored then.
        """
        if not self.eval_sets or step in self._done:
            return
        self.status.activity = "evaluating"
        rows = [row for eval_set in self.eval_sets for row in await self._try_all(eval_set, step)]
        await self._stop_where_all_failed(rows, step)
        await asyncio.wrap_future(self.store.submit(Commit(tables={"evals": rows_to_table("evals", rows)})))
        self._done.add(step)
        self.on_result(step, _summary(rows))

    async def _stop_where_all_failed(self, rows: Sequence[Row], step: int) -> None:
        for name in sorted({str(row["taskset"]) for row in rows}):
            mine = [row for row in rows if row["taskset"] == name]
            errors = [str(row["error"]) for row in mine]
            if not all(errors):
                continue
            worst = commonest_error(errors)
            message = (
                f"evaluation of {name!r} at step {step}: all {len(mine)} tries failed, {worst.times} with: "
                f"{worst.text}; one of its tasks: {str(mine[worst.example]['prompt'])[:SHOWN_CHARACTERS]!r}"
            )
            event: dict[str, object] = {
                "at": datetime.now(UTC),
                "stage": self.stage,
                "step": step,
                "kind": "evaluation_failed",
                "message": message,
            }
            commit = Commit(tables={"events": rows_to_table("events", [event])})
            await asyncio.wrap_future(self.store.submit(commit))
            raise NothingLearntError(f"{message}; mend its cause and run the same command again")

    async def _try_all(self, eval_set: EvalSet, step: int) -> list[Row]:
        async with asyncio.TaskGroup() as tries:
            running = [
                tries.create_task(self._try(eval_set, task, step, position, rollout))
                for position, task in enumerate(eval_set.tasks)
                for rollout in range(eval_set.repeat_times)
            ]
        return _with_accuracy([task.result() for task in running])

    async def _try(self, eval_set: EvalSet, task: Task, step: int, position: int, rollout: int) -> Row:
        name = f"eval/{eval_set.name}/{position:05d}"
        group = Group(
            name, self.stage, step, position, task, epoch=0, refill=0, repeat_times=eval_set.repeat_times
        )
        async with self.slots:
            rows = await run_rollout(
                group,
                rollout,
                workflow=self.workflow_for(task),
                build_model=lambda seed: ChatClient(
                    self.batcher, self.template, eval_set.sampling.with_seed(seed)
                ),
                limits=self.limits,
                seed=int(content_id(name)[:7], 16),
                source={},
            )
        return _eval_row(eval_set.name, task, rows, self.engines.model_version)


def _eval_row(taskset: str, task: Task, rows: Sequence[Row], model_version: int) -> Row:
    last = rows[-1]
    metrics = dict(last.get("metrics") or [])  # type: ignore[call-overload]
    kept = ("stage", "step", "rollout", "task_id", "response_text", "truncated", "error", "seconds")
    return {name: last[name] for name in kept} | {
        "model_version": model_version,
        "taskset": taskset,
        "prompt": task.prompt,
        "answer": task.answer,
        "response_length": sum(int(str(row["response_length"])) for row in rows),
        "reward": last.get("reward"),
        "accuracy": metrics.get("accuracy"),
    }


def _with_accuracy(rows: list[Row]) -> list[Row]:
    """A failed try counts as wrong where the others are measured.

    Without any measurement there is no accuracy.
    """
    if all(row["accuracy"] is None for row in rows):
        return rows
    return [row | {"accuracy": 0.0} if row["error"] else row for row in rows]


def _summary(rows: Sequence[Row]) -> EvalMetrics:
    """By task set: accuracy of all tries, mean reward and length of those
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
        metrics[f"eval/{name}/failed"] = float(sum(bool(row["error"]) for row in mine))
    return metrics
