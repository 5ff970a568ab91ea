"""Steps that end before their last groups, and steps that begin before the one before has ended."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.explorer.conftest import SUMS, Bench, CountingEngine, half_right, put_tasks
from tests.forked import fork
from trinity_data.config import OverRolloutConfig, SynchronizerConfig
from trinity_data.dataset.task import Task
from trinity_data.errors import EngineError
from trinity_data.progress import late_key
from trinity_data.query.audit import audit
from trinity_data.status import Status
from trinity_data.store.store import Store
from trinity_data.synchronizer import Synchronizer
from trinity_data.weights import Weights
from trinity_explorer.engines.engine import Completion, Request
from trinity_explorer.explorer import Explorer
from trinity_operators.advantages import GrpoAdvantage

LATE = {"over_rollout": OverRolloutConfig(ratio=0.25, wait_after_min=0.0)}
TWO_STEPS = {"max_inflight_batches": 2}
FOUR_GROUPS = 4
REPEAT_TIMES = 4


class GatedEngine(CountingEngine):
    """Answers the sum that is `held` only when the sum that `opens` has been asked for."""

    held, opens = 3, 7
    kills = -1
    """The sum at which the process ends, as by kill -9."""

    def __init__(self, tokenizer: Any, *, script: Callable[[str, int], str]) -> None:
        super().__init__(tokenizer, script=script)
        self.gate, self.asked = asyncio.Event(), list[int]()
        self.asked_at_the_gate: list[int] = []

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        prompt = self.tokenizer.decode(requests[0].prompt_token_ids)
        number = int(prompt.split("What is ")[1].split(" ")[0])
        self.asked.append(number)
        if number == self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == self.opens:
            self.asked_at_the_gate = list(self.asked)
            self.gate.set()
        if number == self.held:
            await self.gate.wait()
        return await super().generate(requests)


def build(bench: Bench, tasks: Sequence[Task], *, trained: int = 9) -> Explorer:
    """Four sums a step; any engine of the bench takes rollouts of all groups at a time."""
    bench.batch_size, bench.operators = FOUR_GROUPS, [GrpoAdvantage()]
    bench.more_of_explorer = {"runner_per_model": 64, "max_timeout": 60.0, **bench.more_of_explorer}
    bench.status = Status("run")
    # steps to come may be explored with the first weights
    synchronizer = Synchronizer(
        SynchronizerConfig(sync_offset=99), explored=bench.store.progress("explored/rl")
    )
    return bench.explorer(list(tasks), half_right, synchronizer=synchronizer)


def rows_of(store: Store, *columns: str) -> list[dict[str, Any]]:
    names = ["experience_id", "task_id", "step", "seed", "token_ids", "reward", *columns]
    rows: list[dict[str, Any]] = store.table("experiences").sort_by("experience_id").select(names).to_pylist()
    return rows


def outcomes_of(store: Store) -> list[dict[str, Any]]:
    rows = store.table("outcomes").sort_by("experience_id")
    found: list[dict[str, Any]] = rows.select(["experience_id", "step", "kept", "advantage"]).to_pylist()
    return found


def operator_rows(store: Store) -> dict[int, list[int]]:
    """Rows in of each row of `operators`, by step."""
    found: dict[int, list[int]] = {}
    for row in store.table("operators").to_pylist():
        found.setdefault(row["step"], []).append(row["rows_in"])
    return found


@pytest.fixture
def gated(bench: Bench) -> type[GatedEngine]:
    """What the bench asks; a test may set its attributes."""

    class Engine(GatedEngine): ...

    bench.engine_type = Engine
    return Engine


def kill(bench: Bench, gated: type[GatedEngine], tasks: Sequence[Task], *, at: int) -> None:
    """Explores two steps in a process that ends itself as by kill -9."""
    root = bench.store.root
    bench.store.close()
    gated.opens, gated.kills = -1, at

    def explore(_: Callable[[str], None]) -> None:
        bench.store = Store.create_or_open(root)
        asyncio.run(build(bench, tasks).explore(1, 2))

    output, pid = fork(explore)
    with output:
        said = output.read()
    bench.store = Store.create_or_open(root)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == -signal.SIGKILL, said
    gated.kills = -1


@pytest.fixture
def whole(bench: Bench, tmp_path: Any) -> Bench:
    """A run of eight sums without late groups, in a store of its own."""
    plain = Bench(Store.create_or_open(tmp_path / "whole" / "store"), bench.tokenizer, bench.template)
    asyncio.run(build(plain, put_tasks(plain.store, 8)).explore(1, 2))
    return plain


def test_a_step_ends_without_its_late_group_which_joins_the_next(
    bench: Bench, whole: Bench, gated: type[GatedEngine]
) -> None:
    tasks = put_tasks(bench.store, 8)
    bench.more_of_explorer = LATE
    explorer = build(bench, tasks)
    # the next step is asked for while the group is held, or this would wait for ever
    asyncio.run(explorer.explore(1, 2))
    assert rows_of(bench.store) == rows_of(whole.store)
    assert outcomes_of(bench.store) == outcomes_of(whole.store)
    assert len(bench.store.pending("rl")) == 8 * REPEAT_TIMES
    # the counts of the late group stand by themselves
    assert operator_rows(bench.store) == {1: [12, 4], 2: [16]}
    first, second = (explorer.reporter.trained(step, {}) for step in (1, 2))
    assert (first["rollout/late_groups"], first["rollout/joined_groups"]) == (1, 0)
    assert (second["rollout/late_groups"], second["rollout/joined_groups"]) == (0, 1)
    # a late group counts with the step that it joins
    assert (first["rollout/number"], second["rollout/number"]) == (12, 20)
    tokens = sum(len(row["token_ids"]) for row in rows_of(bench.store))
    prompts = sum(row["prompt_length"] for row in rows_of(bench.store, "prompt_length"))
    assert first["yield/rollout_tokens"] + second["yield/rollout_tokens"] == tokens - prompts
    assert bench.store.progress(late_key("rl", "explorer")) == []
    assert (bench.status.rollouts_done, bench.status.rollouts_total) == (20, 20)


def test_a_run_without_late_groups_has_no_key_and_no_metric_of_them(whole: Bench) -> None:
    assert whole.store.progress(late_key("rl", "explorer")) is None
    assert operator_rows(whole.store) == {1: [16], 2: [16]}


def test_a_late_group_is_finished_after_a_kill(bench: Bench, whole: Bench, gated: type[GatedEngine]) -> None:
    tasks, bench.more_of_explorer = put_tasks(bench.store, 8), LATE
    # in the second step
    kill(bench, gated, tasks, at=6)
    late = "explorer/rl/0000001/00003"
    assert bench.store.progress("explored/rl") == 1
    assert bench.store.progress(late_key("rl", "explorer")) == [late]
    explorer = build(bench, tasks)
    bench.engine.gate.set()  # type: ignore[attr-defined]
    asyncio.run(explorer.explore(2, 2))
    assert rows_of(bench.store) == rows_of(whole.store)
    assert outcomes_of(bench.store) == outcomes_of(whole.store)
    assert {step: sum(rows) for step, rows in operator_rows(bench.store).items()} == {1: 16, 2: 16}
    assert bench.store.progress(late_key("rl", "explorer")) == []
    assert audit(bench.store.root).problems == []


def test_a_late_group_has_a_step_of_its_own_when_the_tasks_are_used_up(
    bench: Bench, gated: type[GatedEngine]
) -> None:
    tasks = put_tasks(bench.store, 4)
    bench.more_of_explorer = LATE

    class Ends(Synchronizer):
        async def finished_exploring(self, step: int) -> None:
            await super().finished_exploring(step)
            engine.gate.set()

    bench.batch_size, bench.operators = FOUR_GROUPS, [GrpoAdvantage()]
    bench.more_of_explorer, bench.tasksets = (
        {"runner_per_model": 64, "max_timeout": 60.0, **LATE},
        [SUMS.model_copy(update={"epochs": 1})],
    )
    synchronizer = Ends(SynchronizerConfig(sync_offset=99))
    explorer = bench.explorer(tasks, half_right, synchronizer=synchronizer)
    engine: Any = bench.engine
    asyncio.run(explorer.explore(1, None))
    assert (synchronizer.explored, synchronizer.last_step) == (2, 2)
    assert len(bench.store.pending("rl", through_step=1)) == 16
    assert operator_rows(bench.store) == {1: [12, 4]}
    assert explorer.reporter.trained(2, {})["rollout/number"] == 4


def test_the_next_step_begins_beside_the_last_rollouts_of_one(
    bench: Bench, whole: Bench, gated: type[GatedEngine]
) -> None:
    tasks = put_tasks(bench.store, 12)
    bench.more_of_explorer = TWO_STEPS
    explorer = build(bench, tasks)
    asyncio.run(explorer.explore(1, 3))
    # the second step was begun before the first one had ended, and the third was not
    assert 7 in bench.engine.asked_at_the_gate  # type: ignore[attr-defined]
    assert not {8, 9, 10, 11} & set(bench.engine.asked_at_the_gate)  # type: ignore[attr-defined]
    assert [row for row in rows_of(bench.store) if row["step"] < 3] == rows_of(whole.store)
    assert [row for row in outcomes_of(bench.store) if row["step"] < 3] == outcomes_of(whole.store)
    assert operator_rows(bench.store) == {1: [16], 2: [16], 3: [16]}
    assert [group["task_id"] for group in bench.table("groups")] == [task.task_id for task in tasks]


def test_steps_that_were_begun_beside_each_other_are_finished_after_a_kill(
    bench: Bench, whole: Bench, gated: type[GatedEngine]
) -> None:
    tasks, bench.more_of_explorer = put_tasks(bench.store, 8), TWO_STEPS
    kill(bench, gated, tasks, at=7)
    assert bench.store.progress("explored/rl") is None
    assert {group["step"] for group in bench.table("groups")} == {1, 2}
    explorer = build(bench, tasks)
    bench.engine.gate.set()  # type: ignore[attr-defined]
    asyncio.run(explorer.explore(1, 2))
    assert rows_of(bench.store) == rows_of(whole.store)
    assert outcomes_of(bench.store) == outcomes_of(whole.store)
    assert operator_rows(bench.store) == {1: [16], 2: [16]}
    assert audit(bench.store.root).problems == []


def test_a_step_that_waits_for_the_training_of_one_begins_after_it(
    bench: Bench, gated: type[GatedEngine]
) -> None:
    tasks = put_tasks(bench.store, 8)
    bench.batch_size, bench.operators = FOUR_GROUPS, [GrpoAdvantage()]
    bench.more_of_explorer = {"runner_per_model": 64, "max_timeout": 60.0, **TWO_STEPS}
    synchronizer, begun = Synchronizer(SynchronizerConfig()), list[int]()

    async def go() -> None:
        explorer = bench.explorer(tasks, half_right, synchronizer=synchronizer)
        bench.engine.gate.set()  # type: ignore[attr-defined]
        exploring = asyncio.create_task(explorer.explore(1, 2))
        await synchronizer.wait_explored(1)
        await asyncio.sleep(0)
        begun.extend(bench.engine.asked)  # type: ignore[attr-defined]
        await synchronizer.finished_training(1)
        await exploring

    asyncio.run(go())
    assert set(begun) == {0, 1, 2, 3}
    assert {row["model_version"] for row in bench.table("experiences") if row["step"] == 2} == {1}
    assert synchronizer.weights_of(1) == Weights(1, "nowhere")


class DeadEngine(CountingEngine):
    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        if "What is 3" in self.tokenizer.decode(requests[0].prompt_token_ids):
            raise EngineError("the engine died")
        return await super().generate(requests)


@pytest.mark.parametrize("more", [LATE, TWO_STEPS, {}])
def test_what_a_group_raises_ends_the_exploring(bench: Bench, more: dict[str, Any]) -> None:
    tasks = put_tasks(bench.store, 40)
    bench.engine_type, bench.more_of_explorer = DeadEngine, more
    explorer = build(bench, tasks)

    async def go() -> None:
        await asyncio.wait_for(explorer.explore(1, 9), 60)

    with pytest.raises(BaseExceptionGroup) as raised:
        asyncio.run(go())
    assert raised.value.subgroup(EngineError) is not None
    assert explorer.running.groups == []
