"""A run that learns nothing says so and stops: every rollout failed, or operators left nothing."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.explorer.conftest import Bench
from trinity_data.dataset.task import Task
from trinity_data.errors import NothingLearntError
from trinity_data.reporter import RolloutCounts, count_rollouts
from trinity_data.store.store import Store
from trinity_data.store.types import State
from trinity_explorer.chat import ChatClient
from trinity_explorer.engines.engine import Sampling
from trinity_explorer.evaluator import EvalSet
from trinity_explorer.explorer import Explorer
from trinity_explorer.failures import commonest_error
from trinity_explorer.rewards.math import Reward
from trinity_operators.experience_pipeline import ExperiencePipeline, ExperienceWriter
from trinity_operators.filters import RewardStdFilter

TRIES_A_STEP = 12
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, min_tokens=0, max_tokens=32, seed=0)


class Raises:
    """A workflow whose reward raises for the rollouts whose seed `fails`;
    otherwise every try is worth the same.
    """

    def __init__(self, fails: Callable[[int], bool]) -> None:
        self.fails = fails

    async def run(self, task: Task, model: ChatClient) -> Reward:
        await model.chat(task.messages)
        if self.fails(model.sampling.seed):
            raise ZeroDivisionError(f"no reward for seed {model.sampling.seed}")
        return Reward(1.0, {"accuracy": 1.0}, {"accuracy": 1.0})


def held_out(tasks: list[Task]) -> EvalSet:
    return EvalSet("held_out", tasks, SAMPLING, repeat_times=2)


def failing(explorer: Explorer, fails: Callable[[int], bool]) -> Explorer:
    explorer.runner.workflow_for = lambda task: Raises(fails)
    return explorer


def without_variance(explorer: Explorer) -> Explorer:
    """Every group is dropped."""
    pipeline = ExperiencePipeline([RewardStdFilter()], "rl")
    writer = ExperienceWriter(explorer.store, pipeline, explorer="explorer")
    explorer.writer = explorer.groups.writer = writer
    return failing(explorer, lambda seed: False)


def test_a_step_in_which_every_rollout_failed_stops_the_run_and_says_what_to_do(
    store: Store, make_explorer: Callable[..., Explorer], tmp_path: Path
) -> None:
    explorer = failing(make_explorer(), lambda seed: True)
    with pytest.raises(NothingLearntError) as stopped:
        asyncio.run(explorer.explore(1, 9))
    said = str(stopped.value)
    assert "stage rl, step 1: all 12 rollouts failed, 12 with: ZeroDivisionError: no reward for seed" in said
    assert f"`trinity-data why {tmp_path} explorer/rl/0000001/00000/000/00` shows one" in said
    assert "run the same command again" in said and "explorer.max_failed_steps: 1" in said
    assert store.progress("explored/rl") == 1
    (event,) = store.table("events").to_pylist()
    assert event["kind"] == "all_failed" and event["message"] in said
    assert stopped.value.exit_code == 1
    # the cause is fixed: the same run goes on with the next step
    asyncio.run(make_explorer().explore_step(2))
    assert store.counts()[State.PENDING] == TRIES_A_STEP


def test_steps_in_a_row_are_counted_and_one_that_comes_to_something_starts_anew(
    store: Store, make_explorer: Callable[..., Explorer]
) -> None:
    explorer = make_explorer()
    explorer.failures.max_failed_steps = 2
    bad = {1, 3, 4}

    async def go() -> None:
        for step in range(1, 6):
            failing(explorer, lambda seed, step=step: step in bad)
            await explorer.explore_step(step)

    with pytest.raises(NothingLearntError, match="step 4: all 12"):
        asyncio.run(go())
    assert [event["step"] for event in store.table("events").to_pylist()] == [1, 3, 4]


def test_some_failed_rollouts_are_counted_and_stop_nothing(
    store: Store, make_explorer: Callable[..., Explorer]
) -> None:
    explorer = failing(make_explorer(), lambda seed: seed % 3 == 0)
    asyncio.run(explorer.explore_step(1))
    failed = store.counts()[State.FAILED]
    assert 0 < failed < TRIES_A_STEP
    metrics = explorer.reporter.trained(1, {})
    assert (metrics["rollout/number"], metrics["rollout/failed"], metrics["rollout/dropped"]) == (
        12,
        failed,
        0,
    )
    # another session knows the numbers too, and not the times
    assert set(make_explorer().reporter.trained(1, {})) == {
        "rollout/number",
        "rollout/failed",
        "rollout/dropped",
        "yield/rollout_tokens",
        "yield/failed_tokens",
        "yield/dropped_tokens",
        "yield/signal",
    }
    status = explorer.status
    assert (status.rollouts_done, status.rollouts_failed) == (TRIES_A_STEP, failed)
    assert status.last_error.startswith("ZeroDivisionError") and status.explored_accuracy.value == 1.0
    assert store.table("events").num_rows == 0


def test_groups_that_are_all_dropped_are_a_warning_and_a_stop_only_where_asked_for(
    store: Store, make_explorer: Callable[..., Explorer]
) -> None:
    explorer = without_variance(make_explorer())

    async def steps() -> None:
        for step in (1, 2, 3):
            await explorer.explore_step(step)
        explorer.failures.max_dropped_steps = 5
        for step in (4, 5, 6):
            await explorer.explore_step(step)

    with pytest.raises(NothingLearntError, match=r"step 5: nothing is left .*explorer\.max_dropped_steps: 5"):
        asyncio.run(steps())
    events = store.table("events").to_pylist()
    assert [(event["step"], event["kind"]) for event in events] == [(n, "all_dropped") for n in range(1, 6)]
    said = (
        "nothing is left of 12 rollouts: 0 failed, "
        "12 were dropped (of their rows reward_std_filter dropped 12)"
    )
    assert said in events[0]["message"]


def test_a_step_of_which_groups_were_kept_ends_without_reading_its_rows(
    store: Store, make_explorer: Callable[..., Explorer], monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = make_explorer().failures
    failures.failed_steps, failures.dropped_steps = 1, 2
    monkeypatch.setattr(store, "group_progress", None)
    pipeline = ExperiencePipeline([], "rl")
    pipeline.kept_groups[1] = 1
    asyncio.run(failures.check(1, pipeline))
    assert (failures.failed_steps, failures.dropped_steps) == (0, 0)


def test_a_rollout_counts_once_however_many_turns_it_has() -> None:
    states = [
        ("e/rl/1/0/000/00", State.PENDING), ("e/rl/1/0/000/01", State.DROPPED),
        ("e/rl/1/0/001/00", State.FAILED), ("e/rl/1/0/002/00", State.DROPPED),
        ("e/rl/1/0/002/01", State.DROPPED), ("e/rl/1/0/003/00", State.TRAINED),
    ]  # fmt: skip
    assert count_rollouts(states) == RolloutCounts(number=4, failed=1, dropped=1)
    assert not count_rollouts(states).came_to_nothing
    assert count_rollouts(states[2:5]).came_to_nothing and not count_rollouts([]).came_to_nothing


def test_errors_that_differ_in_numbers_alone_are_one() -> None:
    errors = [
        "TypeError: x\nat line 3",
        "no end after 5 s; 1 replies came",
        "no end after 5 s; 12 replies came",
        "",
    ]
    worst = commonest_error(errors)
    assert (worst.text, worst.times, worst.example) == ("no end after 5 s; 1 replies came", 2, 1)
    assert commonest_error([""]).text == "an error without a text"
    assert len(commonest_error(["x" * 9000]).text) == 301


def test_an_evaluation_of_which_every_rollout_failed_stops_and_stores_nothing(
    store: Store, bench: Bench, make_explorer: Callable[..., Explorer]
) -> None:
    evaluator, task = make_explorer().evaluator, Task("t", "sums", "What is 1 + 1?", (), "2", "", "")
    task = replace(task, messages=({"role": "user", "content": task.prompt},))
    evaluator.eval_sets = [held_out([task] * 3)]
    evaluator.runner.workflow_for = lambda task: Raises(lambda seed: True)
    with pytest.raises(
        NothingLearntError, match="evaluation of 'held_out' at step 0: all 6 rollouts failed, 6 with: Zero"
    ):
        asyncio.run(evaluator.evaluate(0))
    assert store.table("evals").num_rows == 0
    assert [event["kind"] for event in store.table("events").to_pylist()] == ["evaluation_failed"]
    # the same command, run again
    evaluator = make_explorer().evaluator
    evaluator.eval_sets = [held_out([task] * 3)]
    evaluator.runner.workflow_for = lambda task: Raises(lambda seed: seed % 2 == 0)
    asyncio.run(evaluator.evaluate(0))
    failed = sum(bool(row["error"]) for row in store.table("evals").to_pylist())
    assert 0 < failed < 6
    # a failed rollout is a wrong one, and has no reward
    evaluations = [metrics for _, metrics in bench.monitor.metrics]
    assert evaluations == [
        {"eval/held_out/accuracy": pytest.approx((6 - failed) / 6), "eval/held_out/reward": 1.0,
         "eval/held_out/response_length": pytest.approx(evaluations[0]["eval/held_out/response_length"]),
         "eval/held_out/failed": failed}
    ]  # fmt: skip
    # with the spread beside the means
    evaluator = make_explorer().evaluator
    evaluator.eval_sets, evaluator.reporter.detailed = [held_out([task] * 3)], True
    evaluator.runner.workflow_for = lambda task: Raises(lambda seed: seed % 2 == 0)
    asyncio.run(evaluator.evaluate(1))
    detailed = dict(bench.monitor.metrics[-1][1])
    right = detailed["eval/held_out/accuracy"]
    spread = {kind: detailed[f"eval/held_out/accuracy/{kind}"] for kind in ("min", "max", "std")}
    assert spread == {"min": 0.0, "max": 1.0, "std": pytest.approx(math.sqrt(right * (1 - right)))}
    assert detailed["eval/held_out/reward/std"] == 0.0


def test_sets_behind_one_of_which_every_rollout_failed_are_not_run(
    store: Store, make_explorer: Callable[..., Explorer]
) -> None:
    evaluator, asked = make_explorer().evaluator, list[str]()
    task = Task("t", "sums", "What is 1 + 1?", ({"role": "user", "content": "What is 1 + 1?"},), "2", "", "")
    evaluator.eval_sets = [replace(held_out([replace(task, taskset=name)]), name=name) for name in ("a", "b")]

    def workflow_for(task: Task) -> Raises:
        asked.append(task.taskset)
        return Raises(lambda seed: True)

    evaluator.runner.workflow_for = workflow_for
    with pytest.raises(NothingLearntError, match="evaluation of 'a' at step 0"):
        asyncio.run(evaluator.evaluate(0))
    assert set(asked) == {"a"}
