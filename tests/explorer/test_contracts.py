"""Contracts in the explore loop: what is recorded, dropped and stopped, and what a restart repeats."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.explorer.conftest import Bench, half_right, put_tasks
from trinity_data.config import ContractConfig, SynchronizerConfig
from trinity_data.dataset.task import Task
from trinity_data.errors import ContractError
from trinity_data.query.audit import audit
from trinity_data.schema import group_of
from trinity_data.store.sql import open_sql
from trinity_data.store.types import State
from trinity_data.synchronizer import Synchronizer
from trinity_data.tokenizer import ChatTemplate
from trinity_explorer.chat import ChatModel
from trinity_explorer.recomputation import StepRecomputation
from trinity_explorer.rewards.reward import Reward
from trinity_explorer.workflows.pool import PooledWorkflow
from trinity_explorer.workflows.process import ProcessSettings
from trinity_explorer.workflows.registry import WorkflowSpec
from trinity_operators.advantages import GrpoAdvantage
from trinity_operators.contracts.step_contracts import ContractChecker

RECORDED = ("contract", "action", "value", "held", "row_ids")


def contract(**keys: Any) -> ContractConfig:
    # right answers have a reward of 1.1, others of 0.1
    return ContractConfig.model_validate(
        {"name": "low", "check": "range", "column": "reward", "max": 1.0, **keys}
    )


def explore(bench: Bench, tasks: list[Task], steps: int = 1, *, begin: int = 1) -> Any:
    """In a session of its own; returns the explorer."""
    explored = bench.store.progress("explored/rl")
    # may be far ahead of the trainer
    synchronizer = Synchronizer(SynchronizerConfig(sync_offset=99), explored=explored)
    explorer = bench.explorer(tasks, half_right, synchronizer=synchronizer)
    asyncio.run(explorer.explore(begin, begin + steps - 1))
    return explorer


@pytest.fixture
def tasks(bench: Bench) -> list[Task]:
    bench.operators = [GrpoAdvantage()]
    return put_tasks(bench.store, 20)


def test_a_quarantine_drops_the_rows_that_break_it_with_the_reason(
    bench: Bench, tasks: list[Task], tmp_path: Path
) -> None:
    bench.contracts = [contract(action="quarantine")]
    explore(bench, tasks)
    rows = bench.table("experiences")
    bad = [row["experience_id"] for row in rows if row["reward"] > 1.0]
    assert 0 < len(bad) < len(rows)
    assert set(bench.store.pending("rl")) == {row["experience_id"] for row in rows} - {*bad}
    (found,) = bench.table("contracts")
    assert (found["step"], found["value"], found["held"], found["upper"]) == (1, len(bad), False, 1.0)
    assert sorted(found["row_ids"]) == sorted(found["dropped_ids"]) == sorted(bad)
    decisions = [row for row in bench.table("decisions") if row["operator"] == "low"]
    assert sorted(row["row_id"] for row in decisions) == sorted(bad)
    assert {row["reason"] for row in decisions} == {found["message"]}
    (event,) = [row for row in bench.table("events") if row["kind"] == "contract_broken"]
    assert event["message"] == found["message"]
    bench.store.seal()
    with open_sql([tmp_path]) as session:
        by = session.query(
            "select dropped_by, count(*) as n from experiences where state = 'dropped' group by 1"
        )
    assert by.to_pylist() == [{"dropped_by": "low", "n": len(bad)}]
    report = audit(tmp_path)
    assert report.ok and report.total.dropped_by == {"low": len(bad)}
    assert any(found["message"] in remark for remark in report.remarks)


def test_groups_are_dropped_whole_where_the_contract_says_so(bench: Bench, tasks: list[Task]) -> None:
    bench.contracts = [contract(action="quarantine", drops="groups")]
    explore(bench, tasks)
    bad = {row["group_id"] for row in bench.table("experiences") if row["reward"] > 1.0}
    assert bad and not bad & {group_of(row) for row in bench.store.pending("rl")}


def test_a_warning_leaves_every_row_and_its_number_is_a_metric(bench: Bench, tasks: list[Task]) -> None:
    bench.contracts = [contract(), contract(name="all", max=2.0)]
    explorer = explore(bench, tasks)
    assert bench.store.counts()[State.DROPPED] == 0
    metrics = explorer.reporter.trained(1, {})
    (low, every) = bench.table("contracts")
    assert metrics["contract/low"] == low["value"] > 0
    assert (metrics["contract/all"], every["held"], every["row_ids"]) == (0.0, True, [])


def test_a_stop_ends_the_run_and_is_on_record_once(bench: Bench, tasks: list[Task]) -> None:
    bench.contracts = [contract(action="stop"), contract(name="other")]
    for _ in range(3):
        with pytest.raises(
            ContractError, match=r"step 1: contract 'low' is broken: \d+ of 12 rows have reward"
        ):
            explore(bench, tasks)
    assert bench.store.progress("explored/rl") is None
    assert [row["contract"] for row in bench.table("contracts")] == ["low"]
    assert [row["kind"] for row in bench.table("events")] == ["contract_broken"]
    num_rollouts = len(bench.table("experiences"))
    # as with --accept-changes
    bench.contracts = [contract(), contract(name="other")]
    explore(bench, tasks)
    assert bench.store.progress("explored/rl") == 1
    assert len(bench.table("experiences")) == num_rollouts
    found = [(row["contract"], row["action"]) for row in bench.table("contracts")]
    assert found == [("low", "stop"), ("low", "warn"), ("other", "warn")]


def test_a_restart_does_not_measure_a_finished_step_again_and_the_stored_run_says_the_same(
    bench: Bench, tasks: list[Task]
) -> None:
    bench.contracts = [
        contract(action="quarantine"),
        contract(name="jump", check="drift", max=0.1, steps=1),
        contract(name="share", check="kept_share", column=None, operator="grpo_advantage", max=0.5),
    ]
    explore(bench, tasks, 2)
    explore(bench, tasks, 2, begin=3)
    rows = bench.table("contracts")
    assert [row["step"] for row in rows] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    assert [row["value"] for row in rows if row["contract"] == "share"] == [1.0] * 4
    checker = ContractChecker(bench.contracts, bench.store, stage="rl", explorer="explorer")
    for row in rows:
        (one,) = [each for each in bench.contracts if each.name == row["contract"]]
        again = checker.check(one, checker.rows(row["step"]))
        assert (again.measured.value, again.message) == (row["value"], row["message"])
        assert list(again.measured.rows) == row["row_ids"]


class Unsteady:
    """Rewards that are others each time."""

    def __init__(self) -> None:
        self.calls = 0

    async def run(self, task: Task, model: ChatModel) -> Reward:
        await model.chat(task.messages)
        self.calls += 1
        return Reward(float(self.calls))


def test_a_reward_that_contradicts_its_recomputation_is_a_breach_with_both_values(
    bench: Bench, tasks: list[Task], template: ChatTemplate
) -> None:
    bench.contracts = [ContractConfig(name="again", check="recomputation", sample=3)]
    explore(bench, tasks)
    (steady,) = bench.table("contracts")
    assert (steady["value"], steady["held"]) == (0.0, True)
    explorer = bench.explorer(tasks, half_right)
    unsteady = Unsteady()
    explorer.runner.workflow_for = lambda task: unsteady
    explorer.contracts.recompute.workflow_for = explorer.runner.workflow_for  # type: ignore[union-attr]
    asyncio.run(explorer.explore_step(2))
    found = bench.table("contracts")[1]
    assert (found["value"], found["held"], len(found["row_ids"])) == (3.0, False, 3)
    rewards = {row["experience_id"]: row["reward"] for row in bench.table("experiences")}
    assert f"{found['row_ids'][0]}: stored {rewards[found['row_ids'][0]]:g}, now " in found["message"]
    assert "3 of 3 recomputed rewards are not" in found["message"]


def test_rewards_that_cannot_be_recomputed_are_counted_and_not_called_equal(
    bench: Bench, tasks: list[Task]
) -> None:
    bench.contracts = [ContractConfig(name="again", check="recomputation", sample=12)]
    explorer = bench.explorer(tasks, half_right)
    ours = explorer.runner.workflow_for(tasks[0])
    own = PooledWorkflow(WorkflowSpec("./game.py:Game"), ProcessSettings())
    recompute = explorer.contracts.recompute
    assert isinstance(recompute, StepRecomputation)

    async def two_steps() -> None:
        # the tasks of the first one have the answers 1, 2 and 3
        recompute.workflow_for = lambda task: own if task.answer == "#### 2" else ours
        await explorer.explore_step(1)
        recompute.workflow_for = lambda task: own
        await explorer.explore_step(2)

    asyncio.run(two_steps())
    some, none = bench.table("contracts")
    reason = "workflow './game.py:Game': it may ask several times or use an environment"
    assert (some["value"], some["held"], none["value"], none["held"]) == (0.0, True, None, True)
    assert some["message"] == (
        "contract 'again' holds: 0 of 8 recomputed rewards are not what their functions give again; "
        f"4 cannot be recomputed: {reason}"
    )
    assert none["message"] == (
        "contract 'again' holds: rewards that can be recomputed: nothing to measure; "
        f"12 cannot be recomputed: {reason}"
    )


def test_every_run_warns_of_rewards_that_jump_unless_default_contracts_is_false(
    bench: Bench, tasks: list[Task]
) -> None:
    bench.default_contracts = True

    async def five_wrong_steps() -> None:
        explorer = bench.explorer(tasks, lambda prompt, seed: "#### -1")
        for step in range(1, 6):
            await explorer.explore_step(step)

    asyncio.run(five_wrong_steps())
    asyncio.run(bench.explorer(tasks, half_right).explore_step(6))
    rows = bench.table("contracts")
    assert [row["value"] for row in rows[:5]] == [None] * 5
    assert (rows[5]["contract"], rows[5]["action"], rows[5]["held"]) == ("reward_drift", "warn", False)
    assert sorted(rows[5]["row_ids"]) == sorted(
        row["experience_id"] for row in bench.table("experiences") if row["step"] == 6
    )
    assert [row["message"] for row in bench.table("events")] == [rows[5]["message"]]
    bench.default_contracts = False
    asyncio.run(bench.explorer(tasks, half_right).explore_step(7))
    assert len(bench.table("contracts")) == 6
