"""Deadlines that follow from the rollouts before."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.explorer.conftest import Bench, half_right, put_tasks
from trinity_data.config import DynamicTimeoutConfig, ExplorerConfig
from trinity_data.dataset.task import Task
from trinity_explorer.dynamic_timeout import DynamicTimeout, TimeLimit


def timeout(*, ratio: float = 3.0, warmup: int = 1, longest: float = 10.0) -> DynamicTimeout:
    config = DynamicTimeoutConfig(enable=True, ratio=ratio, warmup_min_steps=warmup)
    return DynamicTimeout(ExplorerConfig(max_timeout=longest, dynamic_timeout=config))


def test_the_limit_is_a_multiple_of_the_mean_and_holds_from_the_next_step_on() -> None:
    found = timeout()
    for seconds in (1.0, 2.0):
        found.count({"error": "", "seconds": seconds})
    assert found.limit == TimeLimit(10.0)
    found.finish_step()
    # 3 × (1 + 2) / 2
    assert found.limit.seconds == 4.5
    assert found.limit.why == "3 × the mean of 2 rollouts, 1.5 s; dynamic_timeout"


def test_it_is_never_above_max_timeout_and_waits_for_the_warm_up() -> None:
    found = timeout(warmup=2)
    found.count({"error": "", "seconds": 1.0})
    found.finish_step()
    assert found.limit == TimeLimit(10.0)
    found.finish_step()
    assert found.limit.seconds == 3.0
    found.count({"error": "", "seconds": 9.0})
    found.finish_step()
    # 3 × 5
    assert found.limit == TimeLimit(10.0)


def test_a_rollout_that_reached_its_limit_counts_and_one_that_failed_at_once_does_not() -> None:
    found = timeout(ratio=2.0)
    found.count({"error": "", "seconds": 1.0})
    found.count({"error": "KeyError: 'x'", "seconds": 0.0})
    found.finish_step()
    assert found.limit.seconds == 2.0
    found.count({"error": "no end after 2 s", "seconds": 2.0})
    found.finish_step()
    # 2 × (1 + 2) / 2
    assert found.limit.seconds == 3.0


def test_nothing_changes_where_it_is_off() -> None:
    found = DynamicTimeout(ExplorerConfig(max_timeout=7.0))
    found.count({"error": "", "seconds": 1.0})
    found.finish_step()
    assert found.limit == TimeLimit(7.0)


def test_a_row_says_that_the_limit_was_reached_and_a_restart_counts_the_last_step_again(bench: Bench) -> None:
    tasks = put_tasks(bench.store, 20)
    bench.more_of_explorer = {"dynamic_timeout": DynamicTimeoutConfig(enable=True, ratio=2.0)}
    bench.trained = 1

    class Hangs:
        async def run(self, task: Task, model: Any) -> float:
            await model.chat(task.messages)
            await asyncio.sleep(60 if task.prompt == tasks[3].prompt else 0.02)
            return 1.0

    async def go(first: int, last: int) -> TimeLimit:
        explorer = bench.explorer(tasks, half_right)
        explorer.runner.workflow_for = lambda task: Hangs()
        await explorer.explore(first, last)
        return explorer.groups.timeout.limit

    asyncio.run(go(1, 2))
    rows = bench.table("experiences")
    # of the second step, whose limit is that of the first
    hung = [row for row in rows if row["task_id"] == tasks[3].task_id]
    seconds = [row["seconds"] for row in rows if row["step"] == 1]
    limit, mean = 2 * sum(seconds) / 12, sum(seconds) / 12
    expected = f"no end after {limit:.3g} s (2 × the mean of 12 rollouts, {mean:.3g} s; dynamic_timeout)"
    assert len(hung) == 4 and all(row["error"].startswith(f"{expected}; ") for row in hung)
    after = [row["seconds"] for row in rows if row["step"] == 2]
    resumed = bench.explorer(tasks, half_right).groups.timeout
    resumed.resume(bench.store, "rl", "explorer", first_step=1, last_step=2)
    assert resumed.limit.seconds == pytest.approx(2 * sum(after) / 12)
