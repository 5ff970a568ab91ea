"""The explore loop over a real store, with the fake engine and the operators of a run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from tests.explorer.conftest import SUMS, Bench, half_right, put_tasks
from trinity_data.dataset.task import Task
from trinity_data.errors import NothingLearntError
from trinity_data.status import Status, total_yield
from trinity_data.store.store import Store
from trinity_data.store.types import State
from trinity_explorer.engines.engine import Sampling
from trinity_explorer.evaluator import EvalSet
from trinity_operators.advantages import GrpoAdvantage
from trinity_operators.base import Mapper, MapperResult

REPEAT_TIMES = 4


def always_right(prompt: str, seed: int) -> str:
    return half_right(prompt, 0)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def expected_groups(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """Whether a group's rewards differ."""
    rewards: dict[str, set[float]] = {}
    for row in rows:
        rewards.setdefault(row["group_id"], set()).add(row["reward"])
    return {group: len(values) > 1 for group, values in rewards.items()}


def test_two_steps_leave_groups_rows_outcomes_decisions_and_counts(bench: Bench) -> None:
    tasks = put_tasks(bench.store, 20)

    async def go() -> None:
        explorer = bench.explorer(tasks, half_right)
        for step in (1, 2):
            assert await explorer.explore_step(step)
            metrics = explorer.reporter.trained(step, {})
            names = set(metrics) - {"operator/reward_std_filter/dropped_tokens"}
            assert names == {
                "time/explore", "time/generate", "rollout/tokens", "rollout/tokens_per_second",
                "rollout/number", "rollout/failed", "rollout/dropped",
                "yield/rollout_tokens", "yield/dropped_tokens", "yield/signal",
            }  # fmt: skip
            page = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()
            assert all(f"`{name}`" in page for name in names)

    run(go())
    groups, rows, outcomes = bench.table("groups"), bench.table("experiences"), bench.table("outcomes")
    assert [group["task_id"] for group in groups] == [task.task_id for task in tasks[:6]]
    assert [(group["step"], group["position"], group["round"]) for group in groups] == [
        (step, position, 0) for step in (1, 2) for position in range(3)
    ]
    assert len(rows) == len(outcomes) == 6 * REPEAT_TIMES
    kept = expected_groups(rows)
    assert sum(kept.values()) > 0
    by_id = {row["experience_id"]: row for row in rows}
    for outcome in outcomes:
        row = by_id[outcome["experience_id"]]
        assert row["reward"] == pytest.approx(1.1 if row["seed"] % 2 == 0 else 0.1)
        assert outcome["kept"] == kept[row["group_id"]]
        assert outcome["dropped_by"] == ("" if outcome["kept"] else "reward_std_filter")
        if outcome["kept"]:
            mates = [r["reward"] for r in rows if r["group_id"] == row["group_id"]]
            mean = sum(mates) / 4
            deviation = (sum((reward - mean) ** 2 for reward in mates) / 3) ** 0.5
            assert outcome["advantage"] == pytest.approx((row["reward"] - mean) / deviation, abs=1e-4)
    num_kept = REPEAT_TIMES * sum(kept.values())
    decisions = Counter((d["operator"], d["kept"]) for d in bench.table("decisions"))
    assert decisions["reward_std_filter", True] == num_kept
    assert decisions["reward_std_filter", False] == 24 - num_kept
    assert decisions["grpo_advantage", True] == num_kept
    counts = bench.table("operators")
    assert [(c["step"], c["operator"]) for c in counts] == [
        (step, name) for step in (1, 2) for name in ("reward_std_filter", "grpo_advantage")
    ]
    assert sum(c["rows_in"] for c in counts if c["position"] == 0) == 24
    assert sum(c["rows_out"] for c in counts if c["position"] == 1) == num_kept
    assert len(bench.store.pending("rl")) == num_kept
    assert bench.store.progress("explored/rl") == 2
    assert (bench.status.rollouts_done, bench.status.rollouts_total) == (12, 12)
    lengths = {row["experience_id"]: row["response_length"] for row in rows}
    dropped = [lengths[outcome["experience_id"]] for outcome in outcomes if not outcome["kept"]]
    shown = bench.status.operators["reward_std_filter"]
    assert (shown.rows_in, len(shown.dropped)) == (24, 2)
    assert tuple(map(sum, zip(*shown.dropped, strict=True))) == (len(dropped), sum(dropped))
    spent = total_yield(bench.status.yields)
    assert (spent.rollout_tokens, spent.dropped_tokens) == (sum(lengths.values()), sum(dropped))


def test_a_step_whose_groups_are_all_filtered_away_ends_after_its_refills(bench: Bench) -> None:
    bench.refill_rounds = 2
    tasks = put_tasks(bench.store, 30)

    async def go() -> None:
        assert await bench.explorer(tasks, always_right).explore_step(1)

    run(go())
    assert [group["round"] for group in bench.table("groups")] == [0] * 3 + [1] * 3 + [2] * 3
    assert bench.store.pending("rl") == []
    assert bench.store.counts()[State.DROPPED] == 9 * REPEAT_TIMES
    assert bench.store.progress("explored/rl") == 1


def test_a_step_says_what_its_refills_cost(bench: Bench) -> None:
    bench.refill_rounds = 2
    explorer_tasks = put_tasks(bench.store, 30)

    async def go() -> dict[str, float]:
        explorer = bench.explorer(explorer_tasks, always_right)
        await explorer.explore_step(1)
        return explorer.reporter.trained(1, {})

    metrics = run(go())
    assert metrics["rollout/number"] == 9 * REPEAT_TIMES
    # two refills of three groups each
    assert (metrics["rollout/refill_rounds"], metrics["rollout/refill_number"]) == (2.0, 6.0 * REPEAT_TIMES)
    tokens = [row["response_length"] for row in bench.table("experiences") if row["position"] >= 3]
    assert metrics["rollout/refill_tokens"] == sum(tokens) > 0


class MeanReward(Mapper):
    reads = ("reward",)

    def map(self, rows: pa.Table) -> MapperResult:
        return MapperResult({}, metrics={"reward": pc.mean(rows["reward"]).as_py()})


def test_what_operators_report_is_in_the_steps_metrics_also_after_a_restart(bench: Bench) -> None:
    bench.operators = [MeanReward(), MeanReward()]
    tasks = put_tasks(bench.store, 3)
    names = ("operator/MeanReward/reward", "operator/MeanReward#1/reward")

    async def go() -> dict[str, float]:
        explorer = bench.explorer(tasks, half_right)
        await explorer.explore_step(1)
        return explorer.reporter.trained(1, {})

    metrics = run(go())
    mean = sum(row["reward"] for row in bench.table("experiences")) / 12
    assert [metrics[name] for name in names] == pytest.approx([mean, mean])

    async def later() -> dict[str, float]:
        return bench.explorer(tasks, half_right).reporter.trained(1, {})

    after = run(later())
    assert [after[name] for name in names] == [metrics[name] for name in names]


def test_a_refill_asks_for_what_is_missing_and_no_more(bench: Bench) -> None:
    bench.refill_rounds = 5
    tasks = put_tasks(bench.store, 30)

    def mixed(prompt: str, seed: int) -> str:
        return always_right(prompt, seed) if "What is 2 " in prompt else half_right(prompt, seed)

    async def go() -> None:
        assert await bench.explorer(tasks, mixed).explore_step(1)

    run(go())
    kept = expected_groups(bench.table("experiences"))
    assert sum(kept.values()) == 3
    groups = bench.table("groups")
    assert groups[-1]["round"] >= 1 and len(groups) == len(kept)
    # every refill asked for exactly the groups that were still missing
    for number in range(1, groups[-1]["round"] + 1):
        before = sum(kept[group["group_id"]] for group in groups if group["round"] < number)
        assert sum(group["round"] == number for group in groups) == 3 - before


def test_failed_rollouts_are_failed_rows_without_outcomes(bench: Bench) -> None:
    tasks = put_tasks(bench.store, 9)
    bench.refill_rounds = 2  # which would fail too, and use up tasks

    async def go() -> None:
        explorer = bench.explorer(tasks, half_right)
        explorer.runner.template.max_prompt_tokens = 1
        with pytest.raises(NothingLearntError, match="all 12 rollouts failed, 12 with: the prompt has"):
            await explorer.explore_step(1)

    run(go())
    assert {row["error"][:10] for row in bench.table("experiences")} == {"the prompt"}
    assert {state: n for state, n in bench.store.counts().items() if n} == {State.FAILED: 12}
    assert bench.table("outcomes") == []


def test_a_restart_in_the_middle_of_a_step_explores_only_what_is_missing(
    bench: Bench, tmp_path: Path
) -> None:
    tasks = put_tasks(bench.store, 20)
    uninterrupted_store = Store.create_or_open(tmp_path / "whole")
    put_tasks(uninterrupted_store, 20)
    uninterrupted = Bench(uninterrupted_store, bench.tokenizer, bench.template, batch_size=6)
    run(uninterrupted.explorer(tasks, half_right).explore_step(1))

    bench.batch_size = 6

    async def killed() -> None:
        explorer = bench.explorer(tasks, half_right)
        groups = await explorer._new_groups(1, 6, first=0, refill=0)
        # two groups end; of the third two rollouts are stored, without outcomes
        explorer._start(groups[:2])
        await explorer._wait_for_groups(1, 2, is_last=True)
        await explorer.groups._run_rollouts(groups[2], [0, 1], completes_group=False)

    run(killed())
    bench.store.close()
    bench.store = Store.create_or_open(bench.store.root)

    async def resumed() -> None:
        await bench.explorer(tasks, half_right).explore(1, 1)

    bench.status = Status("run")
    run(resumed())
    assert len(bench.engine.seeds) == 2 + 3 * REPEAT_TIMES
    assert bench.store.pending("rl") == uninterrupted_store.pending("rl")
    for name, key in (
        ("experiences", "experience_id"),
        ("outcomes", "experience_id"),
        ("groups", "group_id"),
    ):
        columns = ["group_id", "reward", "seed", "token_ids"] if name == "experiences" else ["group_id"]
        columns += ["advantage", "kept"] if name == "outcomes" else []
        mine, theirs = (
            s.store.table(name).sort_by(key).select([key, *columns]).to_pylist()
            for s in (bench, uninterrupted)
        )
        assert mine == theirs, name
    kept = pc.sum(bench.store.table("outcomes")["kept"]).as_py()
    counts = [(c["operator"], c["rows_in"], c["rows_out"]) for c in bench.table("operators")]
    assert counts == [("reward_std_filter", 24, kept), ("grpo_advantage", kept, kept)]
    uninterrupted_store.close()
    bench.store.close()


def test_a_restart_after_a_step_goes_on_with_the_next_tasks(bench: Bench) -> None:
    tasks = put_tasks(bench.store, 20)
    bench.trained = 1
    run(bench.explorer(tasks, half_right).explore(1, 2))
    bench.trained = 3
    run(bench.explorer(tasks, half_right).explore(3, 4))
    assert [group["task_id"] for group in bench.table("groups")] == [task.task_id for task in tasks[:12]]


def test_tasks_that_are_used_up_end_the_loop_with_a_short_step(bench: Bench) -> None:
    tasks = put_tasks(bench.store, 4)
    bench.trained, bench.tasksets = 9, [SUMS.model_copy(update={"epochs": 1})]

    async def go() -> int | None:
        explorer = bench.explorer(tasks, half_right)
        await explorer.explore(1, None)
        assert await explorer.synchronizer.wait_explored(2)
        assert not await explorer.synchronizer.wait_explored(3)
        return explorer.synchronizer.last_step

    assert run(go()) == 2
    assert [group["step"] for group in bench.table("groups")] == [1, 1, 1, 2]


def eval_set(tasks: list[Task], sampling: Sampling) -> EvalSet:
    return EvalSet("held_out", tasks, sampling, repeat_times=2)


def test_an_evaluation_is_one_commit_and_is_not_repeated_after_a_restart(
    bench: Bench, sampling: Sampling
) -> None:
    tasks = put_tasks(bench.store, 5)
    bench.eval_sets = [eval_set(tasks, sampling)]
    commits: list[pa.Table] = []

    async def session() -> None:
        evaluator = bench.explorer(tasks).evaluator
        for step in (0, 1, 2, 2):
            await evaluator.evaluate_if_due(step)
            commits.append(bench.store.table("evals"))

    run(session())
    assert [table.num_rows for table in commits] == [10, 10, 20, 20]
    run(session())
    rows = bench.table("evals")
    assert len(rows) == 20 and [step for step, _ in bench.monitor.metrics] == [0, 2]
    assert [(row["task_id"], row["rollout"]) for row in rows[:10]] == [
        (task.task_id, rollout) for task in tasks for rollout in (0, 1)
    ]
    first = [row for row in rows if row["step"] == 0]
    assert all(row["accuracy"] == float(row["response_text"] == row["answer"]) for row in first)
    accuracy = sum(row["accuracy"] for row in first) / 10
    assert bench.monitor.metrics[0][1]["eval/held_out/accuracy"] == pytest.approx(accuracy)
    assert 0 < accuracy < 1


def test_an_evaluation_asks_with_the_same_seeds_at_every_step(bench: Bench, sampling: Sampling) -> None:
    bench.eval_sets = [eval_set(put_tasks(bench.store, 5), sampling)]

    async def go() -> None:
        evaluator = bench.explorer([]).evaluator
        await evaluator.evaluate(3)
        await evaluator.evaluate(8)

    run(go())
    rows = bench.table("evals")
    assert [r["response_text"] for r in rows if r["step"] == 3] == [
        r["response_text"] for r in rows if r["step"] == 8
    ]


def test_rows_with_a_cut_prompt_are_stored_with_the_reason_and_no_operator_sees_them(bench: Bench) -> None:
    tasks = put_tasks(bench.store, 2)
    bench.batch_size = 2
    # of the two prompts, the one that is longer is cut
    longer = replace(
        tasks[1], messages=({"role": "user", "content": f"{tasks[1].prompt} Count well, please."},)
    )
    bench.template.max_prompt_tokens = len(bench.template.encode(tasks[0].messages).token_ids)
    bench.template.truncate = True

    async def go() -> None:
        assert await bench.explorer([tasks[0], longer], always_right).explore_step(1)

    bench.operators = [GrpoAdvantage()]
    run(go())
    rows = {row["experience_id"]: row for row in bench.table("experiences")}
    cut = sorted(row for row in rows if rows[row]["truncated"] == "prompt")
    assert len(rows) == 2 * REPEAT_TIMES and len(cut) == REPEAT_TIMES
    assert not any(any(rows[row]["action_mask"]) for row in cut)
    outcomes = {row["experience_id"]: row for row in bench.table("outcomes")}
    assert sorted(row for row in outcomes if not outcomes[row]["kept"]) == cut
    assert {outcomes[row]["dropped_by"] for row in cut} == {"trainable"}
    said = {row["row_id"]: row for row in bench.table("decisions") if row["operator"] == "trainable"}
    why = (
        "the prompt was longer than model.max_prompt_tokens and was cut to "
        f"{bench.template.max_prompt_tokens} tokens"
    )
    assert sorted(said) == cut
    assert {(row["reason"], row["kept"], row["position"]) for row in said.values()} == {(why, False, None)}
    # the operator saw the others alone
    (count,) = [row for row in bench.table("operators") if row["operator"] == "grpo_advantage"]
    assert (count["rows_in"], count["rows_out"]) == (REPEAT_TIMES, REPEAT_TIMES)
    assert sorted(bench.store.pending("rl")) == sorted(set(rows) - set(cut))


def test_so_many_rollouts_run_at_a_time_whatever_the_groups(bench: Bench) -> None:
    tasks, most = put_tasks(bench.store, 3), 0

    class Slow:
        running = 0

        async def run(self, task: Task, model: Any) -> float:
            nonlocal most
            Slow.running += 1
            most = max(most, Slow.running)
            await model.chat(task.messages)
            await asyncio.sleep(0.01)
            Slow.running -= 1
            return 1.0

    async def go() -> None:
        explorer = bench.explorer(tasks, always_right)
        explorer.runner.workflow_for = lambda task: Slow()
        assert await explorer.explore_step(1)

    run(go())
    # groups of four, three at once; two rollouts were allowed
    assert (len(bench.table("experiences")), most) == (12, 2)
