"""Rollouts of tasks before the first step, over a real store and the fake engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.explorer.conftest import Bench, Conditions, CountingEngine, put_tasks
from trinity_data.dataset.task import Task
from trinity_data.errors import EngineError
from trinity_data.status import Status
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_data.weights import Weights
from trinity_explorer.engines.engine import Completion, Request
from trinity_explorer.engines.pool import EnginePool
from trinity_explorer.rollout import RolloutRunner
from trinity_explorer.task_prober import TaskProber
from trinity_explorer.workflows.registry import WorkflowSpec, build_workflow
from trinity_explorer.workflows.workflow import Workflow
from trinity_operators.task_engines import TriedTask

Script = Callable[[str, int], str]
FIRST = Weights(0, "nowhere")


def right(prompt: str, seed: int) -> str:
    first = int(prompt.split("What is ")[1].split(" ")[0])
    return f"#### {first + 1}"


def wrong(prompt: str, seed: int) -> str:
    return "#### -1"


class Session:
    """A session of a run that asks about tasks."""

    def __init__(self, bench: Bench, conditions: Conditions | None = None) -> None:
        self.bench, self.conditions = bench, conditions or Conditions()
        self.progress = 0

    def attempt(
        self,
        tasks: Sequence[Task],
        script: Script = right,
        *,
        engine: CountingEngine | None = None,
        workflow: Workflow | None = None,
        num_rollouts: int = 2,
        runs: Sequence[Path] | None = (),
    ) -> list[TriedTask]:
        self.engine = engine or CountingEngine(self.bench.tokenizer, script=script)
        return asyncio.run(self._attempt(tasks, workflow, num_rollouts, runs))

    async def _attempt(
        self, tasks: Sequence[Task], workflow: Workflow | None, num_rollouts: int, runs: Sequence[Path] | None
    ) -> list[TriedTask]:
        stage, bench = self.bench.stage("explorer"), self.bench
        used = workflow or build_workflow(WorkflowSpec("math_workflow"))
        runner = RolloutRunner(
            stage.explorer, EnginePool([self.engine]), bench.template, lambda task: used, seed=7
        )
        self.prober = TaskProber(stage, bench.store, bench.status, self.conditions)
        asking = asyncio.create_task(
            asyncio.to_thread(
                self.prober.attempt, tasks, num_rollouts=num_rollouts, pass_above=0.5, runs=runs
            )
        )

        async def asked() -> None:
            await asyncio.wait({asking})

        async def goes_on() -> None:
            self.progress += 1

        self.prober.wait_for(asked)
        # what is asked before there are engines waits for them
        await asyncio.sleep(0)
        await self.prober.run(runner, FIRST, goes_on=goes_on)
        return asking.result()


def test_each_task_is_a_row_with_its_passes_and_its_cost(bench: Bench) -> None:
    tasks = put_tasks(bench.store, 3)
    session = Session(bench)
    tried = session.attempt(tasks, lambda prompt, seed: (wrong if "0 + 1" in prompt else right)(prompt, seed))
    assert [each.rewards for each in tried] == [(0.1, 0.1), (1.1, 1.1), (1.1, 1.1)]
    rows = sorted(bench.table("task_probes"), key=lambda row: row["prompt"])
    assert [(row["prompt"], row["rollouts"], row["passes"], row["failed"]) for row in rows] == [
        ("What is 0 + 1?", 2, 0, 0), ("What is 1 + 1?", 2, 2, 0), ("What is 2 + 1?", 2, 2, 0),
    ]  # fmt: skip
    assert rows[0]["task_id"] == tasks[0].task_id and rows[0]["model"] == "digest"
    prompt, _ = bench.template.encode(tasks[0].messages, ())
    # the end token is one more
    response = len(bench.tokenizer.encode("#### -1", add_special_tokens=False)) + 1
    assert (rows[0]["requests"], rows[0]["tokens"]) == (2, 2 * (len(prompt) + response))
    assert (tried[0].requests, tried[0].tokens) == (2, 2 * (len(prompt) + response))
    (event,) = [row for row in bench.table("events") if row["kind"] == "tasks_probed"]
    assert event["message"].startswith("3 tasks, 2 rollouts each: 6 requests, ")
    assert (bench.status.rollouts_done, session.progress) == (6, 3)


def test_a_resume_and_a_later_run_ask_only_about_what_is_not_on_record(bench: Bench, tmp_path: Path) -> None:
    tasks = put_tasks(bench.store, 4)
    first = Session(bench)
    first.attempt(tasks[:3])
    resumed = Session(bench)
    tried = resumed.attempt(tasks, wrong)
    assert len(resumed.engine.seeds) == 2
    assert [each.rewards for each in tried] == [(1.1, 1.1)] * 3 + [(0.1, 0.1)]
    assert [each.num_rollouts for each in tried] == [0, 0, 0, 2]
    later_store = Store.create_or_open(tmp_path / "later" / "store")
    later = Session(Bench(later_store, bench.tokenizer, bench.template))
    assert later.attempt(tasks, runs=[bench.store.root.parent]) == [TriedTask(each.rewards) for each in tried]
    assert later.engine.seeds == [] and later_store.table("task_probes").num_rows == 0
    later_store.close()


@pytest.mark.parametrize("other", [Conditions(digest="another"), Conditions(settings="hotter")])
def test_another_model_or_another_way_to_ask_is_asked(bench: Bench, other: Conditions) -> None:
    tasks = put_tasks(bench.store, 1)
    Session(bench).attempt(tasks)
    changed = Session(bench, other)
    changed.attempt(tasks)
    assert len(changed.engine.seeds) == 2


def test_more_rollouts_than_on_record_are_made_anew(bench: Bench) -> None:
    tasks = put_tasks(bench.store, 1)
    Session(bench).attempt(tasks, num_rollouts=2)
    more = Session(bench)
    assert len(more.attempt(tasks, num_rollouts=3)[0].rewards) == 3 == len(more.engine.seeds)
    fewer = Session(bench)
    assert len(fewer.attempt(tasks, num_rollouts=1)[0].rewards) == 3 and fewer.engine.seeds == []


class FailsAtOne:
    """A workflow that cannot do `1 + 1`, and knows of no other failure."""

    async def run(self, task: Task, model: Any) -> float:
        await model.chat(task.messages)
        if task.prompt == "What is 1 + 1?":
            raise KeyError("tool")
        return 1.0


def test_a_failure_is_an_error_of_its_row_and_is_asked_about_again(bench: Bench) -> None:
    tasks = put_tasks(bench.store, 2)
    tried = Session(bench).attempt(tasks, workflow=FailsAtOne())
    assert [each.error for each in tried] == ["", "KeyError: 'tool'"] and tried[1].rewards == ()
    row = next(row for row in bench.table("task_probes") if row["error"])
    # what the failed rollouts asked was paid for
    assert (row["rollouts"], row["failed"], row["passes"], row["requests"]) == (2, 2, 0, 2)
    again = Session(bench)
    assert [each.rewards for each in again.attempt(tasks)] == [(1.0, 1.0), (1.1, 1.1)]


class FullEngine(CountingEngine):
    """Counts how many requests it has at the same time."""

    most = running = 0

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.running += len(requests)
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.001)
        self.running -= len(requests)
        return await super().generate(requests)


def test_as_many_rollouts_are_under_way_as_the_engines_have_slots_for(bench: Bench) -> None:
    engine = FullEngine(bench.tokenizer, script=right)
    # runner_per_model is 2
    Session(bench).attempt(put_tasks(bench.store, 12), engine=engine, num_rollouts=3)
    assert engine.most == 2 and len(engine.seeds) == 36


class DeadEngine(CountingEngine):
    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        if len(self.seeds) >= 4:
            raise EngineError("the vllm engine died")
        return await super().generate(requests)


def test_a_dead_engine_ends_the_work_and_what_was_made_is_kept(bench: Bench) -> None:
    tasks = put_tasks(bench.store, 6)
    with pytest.raises(EngineError, match="the vllm engine died"):
        Session(bench).attempt(tasks, engine=DeadEngine(bench.tokenizer, script=right))
    # what was submitted before the engine died may be on its way to the disk
    bench.store.commit(Commit(progress={"tests/last": 1}))
    done = bench.store.table("task_probes").num_rows
    assert 0 < done < 6
    resumed = Session(bench)
    resumed.attempt(tasks)
    assert len(resumed.engine.seeds) == 2 * (6 - done)


def test_an_operator_that_waits_for_engines_fails_when_the_stage_ends(bench: Bench) -> None:
    (task,), errors = put_tasks(bench.store, 1), list[BaseException]()

    async def go() -> None:
        prober = TaskProber(bench.stage("explorer"), bench.store, Status("run"), Conditions())

        def ask() -> None:
            try:
                prober.attempt([task], num_rollouts=1, pass_above=0.5, runs=())
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        while not prober._waiting:
            await asyncio.sleep(0.001)
        prober.close()
        await asyncio.to_thread(thread.join, 10)
        assert not thread.is_alive()

    asyncio.run(go())
    assert [f"{type(error).__name__}: {error}" for error in errors] == ["OperatorError: the stage ends"]


def test_later_weights_are_asked_anew_and_this_run_finds_their_answers_again(bench: Bench) -> None:
    (task,) = put_tasks(bench.store, 1)
    seeds = list[int]()

    async def ask(versions: Sequence[int]) -> list[dict[str, Any]]:
        stage, engine = bench.stage("explorer"), CountingEngine(bench.tokenizer, script=right)
        workflow = build_workflow(WorkflowSpec("math_workflow"))
        runner = RolloutRunner(
            stage.explorer, EnginePool([engine]), bench.template, lambda task: workflow, seed=7
        )
        prober = TaskProber(stage, bench.store, bench.status, Conditions())
        bench.status.begin_rollouts(100)
        for version in versions:
            # before the second it is exploring, and the step's rollouts are counted, not these
            await prober.run(runner, Weights(version, "nowhere"), goes_on=lambda: asyncio.sleep(0))
            await asyncio.to_thread(prober.attempt, [task], num_rollouts=1, pass_above=0.5, runs=())
        seeds.append(len(engine.seeds))
        return bench.table("task_probes")

    rows = asyncio.run(ask([0, 3]))
    assert [row["model_version"] for row in rows] == [0, 3] and len({row["model"] for row in rows}) == 2
    assert (bench.status.rollouts_total, bench.status.rollouts_done) == (100, 0)
    assert asyncio.run(ask([0, 3])) == rows and seeds == [2, 0]


def test_the_other_runs_of_the_project_are_looked_into_where_none_is_named(
    bench: Bench, tmp_path: Path
) -> None:
    tasks = put_tasks(bench.store, 2)
    Session(bench).attempt(tasks)
    project = bench.store.root.parents[1]
    store = Store.create_or_open(project / "later" / "store")
    later = Session(Bench(store, bench.tokenizer, bench.template))
    later.attempt(tasks, runs=None)
    store.close()
    assert later.engine.seeds == []
