"""The experience pipeline over plain rows: no explorer, no engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from trinity_data.errors import OperatorError
from trinity_data.schema import experience_id, group_id, rows_to_table
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_operators.advantages import GrpoAdvantage
from trinity_operators.base import Filter, FilterResult, Operator
from trinity_operators.experience_pipeline import ExperiencePipeline, ExperienceWriter, Row
from trinity_operators.filters import RewardFilter, RewardStdFilter


class EveryThird(Filter):
    """Keeps every third row that it has ever seen."""

    keeps_state = True
    seen = 0

    def apply(self, rows: pa.Table) -> FilterResult:
        numbers = np.arange(self.seen, self.seen + rows.num_rows)
        self.seen += rows.num_rows
        return FilterResult(numbers % 3 == 0, "not the third")


def group(
    step: int,
    position: int,
    rewards: Sequence[float],
    *,
    failed: int = 0,
    untrainable: int = 0,
    explorer: str = "explorer",
) -> list[Row]:
    """A group of which the first rollouts failed and the next are marked as untrainable."""
    name = group_id(explorer, "rl", step, position)
    return [
        {
            "experience_id": experience_id(name, rollout),
            "group_id": name,
            "task_id": f"t{position}",
            "stage": "rl",
            "step": step,
            "position": position,
            "rollout": rollout,
            "turn": 0,
            "reward": reward,
            "error": "broke" if rollout < failed else "",
            "info": '{"untrainable": "too long"}' if failed <= rollout < failed + untrainable else "{}",
        }
        for rollout, reward in enumerate(rewards)
    ]


def table(*groups: list[Row]) -> pa.Table:
    return rows_to_table("experiences", [row for rows in groups for row in rows])


def kept(outcomes: pa.Table) -> list[bool]:
    return [bool(value) for value in outcomes["kept"].to_pylist()]


def test_groups_of_two_steps_get_outcomes_decisions_and_counts() -> None:
    pipeline = ExperiencePipeline([RewardStdFilter(), GrpoAdvantage()], "rl")
    tables = pipeline.apply(table(group(1, 0, [0, 1]), group(1, 1, [1, 1]), group(2, 0, [0, 2])))
    outcomes = tables["outcomes"]
    assert outcomes["step"].to_pylist() == [1, 1, 1, 1, 2, 2]
    assert kept(outcomes) == [True, True, False, False, True, True]
    assert outcomes["dropped_by"].to_pylist() == ["", "", "reward_std_filter", "reward_std_filter", "", ""]
    # (R − mean)/(s + 1e-6): s is 1/√2 for 0 and 1, √2 for 0 and 2
    advantages = [
        -0.5 / (0.5**0.5 + 1e-6),
        0.5 / (0.5**0.5 + 1e-6),
        -1 / (2**0.5 + 1e-6),
        1 / (2**0.5 + 1e-6),
    ]
    assert outcomes.filter(outcomes["kept"])["advantage"].to_pylist() == pytest.approx(advantages)
    # the filter decides on all six rows, the advantage on the four that are left
    assert tables["decisions"]["operator"].value_counts().to_pylist() == [
        {"values": "reward_std_filter", "counts": 6},
        {"values": "grpo_advantage", "counts": 4},
    ]
    assert pipeline.kept_groups == {1: 1, 2: 1}
    assert [(count.rows_in, count.rows_out) for count in pipeline.counts(1)] == [(4, 2), (2, 2)]


def test_counts_of_a_step_add_up_over_calls() -> None:
    pipeline = ExperiencePipeline([RewardFilter(threshold=0.5)], "rl")
    for position, rewards in enumerate(([0.0, 1.0], [1.0, 1.0], [0.0, 0.0])):
        pipeline.apply(table(group(3, position, rewards)))
    (row,) = pipeline.counts_table(3).to_pylist()
    assert (row["operator"], row["position"], row["rows_in"], row["rows_out"]) == ("reward_filter", 0, 6, 3)
    assert (row["stage"], row["step"], row["pipeline"]) == ("rl", 3, "experience")
    assert pipeline.kept_groups == {3: 2}
    assert pipeline.counts(4) == []


def test_failed_rows_get_no_outcome_and_untrainable_ones_are_dropped_before_the_operators() -> None:
    pipeline = ExperiencePipeline([RewardFilter(threshold=0.5)], "rl")
    tables = pipeline.apply(table(group(1, 0, [0, 1, 1, 0], failed=1, untrainable=1)))
    assert tables["outcomes"]["dropped_by"].to_pylist() == ["trainable", "", "reward_filter"]
    first = tables["decisions"].to_pylist()[0]
    assert (first["operator"], first["position"], first["reason"]) == ("trainable", None, "too long")
    assert [count.rows_in for count in pipeline.counts(1)] == [2]
    assert pipeline.apply(table(group(1, 1, [0, 0], failed=2))) == {}


def test_a_new_pipeline_over_stored_rows_goes_on_with_the_state_and_the_counts(tmp_path: Path) -> None:
    def build() -> list[Operator]:
        return [RewardFilter(threshold=0.5), EveryThird()]

    groups = [table(group(step, 0, [1, 0, 1, 1])) for step in (1, 1, 2)]
    undisturbed, before = ExperiencePipeline(build(), "rl"), ExperiencePipeline(build(), "rl")
    expected = [undisturbed.apply(rows)["outcomes"] for rows in groups]
    store = Store.create_or_open(tmp_path / "store")
    store.commit(Commit(tables={"experiences": groups[0]} | before.apply(groups[0])))
    resumed = ExperiencePipeline(build(), "rl")
    resumed.replay_state(store, id_prefix="explorer/")
    resumed.resume_step(store, 1, [group_id("explorer", "rl", 1, 0)])
    assert resumed.kept_groups == before.kept_groups
    assert [vars(each) | {"microseconds": 0} for each in resumed.counts(1)] == [
        vars(each) | {"microseconds": 0} for each in before.counts(1)
    ]
    assert kept(resumed.apply(groups[1])["outcomes"]) == kept(expected[1])
    assert kept(resumed.apply(groups[2])["outcomes"]) == kept(expected[2])
    stricter = ExperiencePipeline([RewardFilter(threshold=1.5), EveryThird()], "rl")
    with pytest.raises(OperatorError, match="a resume cannot go on as the run would have"):
        stricter.replay_state(store)
    store.close()


def writer(
    store: Store, *operators: Operator, explorer: str = "explorer", operator_timeout: float = 600.0
) -> ExperienceWriter:
    chain = operators or (RewardFilter(threshold=0.5), EveryThird())
    return ExperienceWriter(
        store, ExperiencePipeline(chain, "rl"), explorer=explorer, operator_timeout=operator_timeout
    )


def write(to: ExperienceWriter, *places: tuple[int, int]) -> None:
    async def go() -> None:
        await to.prepare()
        for step, position in places:
            rows = group(
                step, position, [(rollout + position) % 3 for rollout in range(5)], explorer=to.explorer
            )
            await to.add_group(rows, rows)

    asyncio.run(go())


def stored_decisions(store: Store) -> list[tuple[str, bool]]:
    rows = store.table("outcomes", columns=["experience_id", "kept"]).to_pylist()
    return [
        (row["experience_id"], row["kept"]) for row in rows if row["experience_id"].startswith("explorer/")
    ]


PLACES = [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0)]


@pytest.mark.parametrize("num_before", [1, 2, 3])
def test_an_experience_operator_that_keeps_state_goes_on_after_a_resume(
    tmp_path: Path, num_before: int
) -> None:
    undisturbed, store = (Store.create_or_open(tmp_path / name) for name in ("undisturbed", "store"))
    write(writer(undisturbed), *PLACES)
    write(writer(store), *PLACES[:num_before])
    write(writer(store, explorer="other"), (1, 0))
    write(writer(store), *PLACES[num_before:])
    assert stored_decisions(store) == stored_decisions(undisturbed)
    assert 0 < sum(was for _, was in stored_decisions(store)) < len(stored_decisions(store))
    store.close()
    undisturbed.close()


def test_an_experience_operator_of_a_user_that_hangs_ends_the_run_with_its_name(tmp_path: Path) -> None:
    never = threading.Event()

    class Hangs(Filter):
        def apply(self, rows: pa.Table) -> FilterResult:
            never.wait()
            return FilterResult(np.ones(rows.num_rows, bool), "")

    store = Store.create_or_open(tmp_path / "store")
    hanging = writer(store, RewardFilter(threshold=-1.0), Hangs(), operator_timeout=0.5)
    with pytest.raises(OperatorError, match=r"operators\[1\]: 'Hangs', at 5 rows, .* did not end within"):
        write(hanging, (1, 0))
    never.set()
    store.close()


def test_a_resume_with_an_operator_that_answers_otherwise_is_refused(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path / "store")
    write(writer(store), *PLACES[:2])
    changed = writer(store, RewardFilter(threshold=1.5), EveryThird())
    with pytest.raises(
        OperatorError, match="a resume cannot go on as the run would have: experience 'explorer/"
    ):
        write(changed, (2, 0))
    store.close()
