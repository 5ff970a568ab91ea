"""What steps get is the same whether the run was killed or not, and rests on earlier steps alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.explorer.conftest import SUMS, Bench, half_right, put_tasks
from trinity_data.config import CurriculumConfig, SynchronizerConfig, TaskSelectorConfig, TasksetConfig
from trinity_data.errors import ConfigError, EngineError
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_data.synchronizer import Synchronizer

STEPS, TASKS = 5, 14
# half of the weight for what was not tried, and the rest by how undecided a task is
SQL = """
select task_id, case when rollouts = 0 then 0.5 else 0.1 + pass_rate * (1 - pass_rate) end as weight
from task_stats where last_step is null or last_step < (select max(last_step) from task_stats)
"""


def sums(name: str = "sums", **values: Any) -> TasksetConfig:
    return SUMS.model_copy(update={"name": name, **values})


def by(kind: str, *features: str) -> TaskSelectorConfig:
    return TaskSelectorConfig(selector_type=kind, seed=5, feature_keys=features)


def weighted_by(sql: str, **values: Any) -> TasksetConfig:
    return sums(curriculum=CurriculumConfig(sql=sql, **values))


CHOICES: dict[str, dict[str, Any]] = {
    "sequential": {"tasksets": [sums(task_selector=by("sequential"), shuffle=False)]},
    "shuffle": {"tasksets": [sums(task_selector=by("shuffle"))]},
    "random": {"tasksets": [sums(task_selector=by("random"))]},
    "easy to hard": {"tasksets": [sums(task_selector=by("offline_easy2hard", "weak"))]},
    "difficulty": {"tasksets": [sums(task_selector=by("difficulty_based", "weak", "strong"))]},
    "sql": {"tasksets": [weighted_by(SQL, every=2)]},
    "weighted": {
        "tasksets": [sums(weight=2.0), sums("more", repeat_times=2, task_selector=by("random"))],
    },
    "in turn": {"tasksets": [sums(task_selector=by("difficulty_based", "weak", "strong")), sums("more")],
                "mix": "in_turn"},
}  # fmt: skip


def prepare(bench: Bench, choice: dict[str, Any]) -> list[Any]:
    for name, value in choice.items():
        setattr(bench, name, value)
    bench.refill_rounds = 1
    return [task for each in bench.tasksets for task in put_tasks(bench.store, TASKS, taskset=each.name)]


def explore(bench: Bench, tasks: list[Any], *, requests: int | None = None) -> bool:
    """A session to the end, or until the engine has answered so many requests; whether it got to the end."""
    left = requests

    def script(prompt: str, seed: int) -> str:
        nonlocal left
        if left is not None:
            left -= 1
            if left < 0:
                raise EngineError("killed")
        return half_right(prompt, seed)

    far_ahead = Synchronizer(SynchronizerConfig(sync_offset=99), explored=bench.store.progress("explored/rl"))

    async def go() -> None:
        explorer = bench.explorer(tasks, script, synchronizer=far_ahead)
        await explorer.explore(far_ahead.explored + 1, STEPS)

    ended = True
    try:
        asyncio.run(go())
    except* EngineError:
        ended = False
        # what it had submitted is written before the next session looks
        bench.store.commit(Commit())
    return ended


def groups(bench: Bench) -> list[tuple[Any, ...]]:
    keys = ("step", "position", "task_id", "epoch", "round", "repeat_times")
    return [tuple(row[key] for key in keys) for row in bench.table("groups")]


@pytest.fixture
def other(tmp_path: Path, bench: Bench) -> Any:
    store = Store.create_or_open(tmp_path / "other")
    yield Bench(store, bench.tokenizer, bench.template)
    store.close()


@pytest.mark.parametrize("name", CHOICES)
def test_a_run_that_is_killed_again_and_again_has_the_groups_of_one_that_is_not(
    bench: Bench, other: Bench, name: str
) -> None:
    assert explore(bench, prepare(bench, CHOICES[name]))
    whole = groups(bench)
    assert {row[0] for row in whole} == set(range(1, STEPS + 1))
    tasks, sessions = prepare(other, CHOICES[name]), 1
    # within a group, within a step, and between two
    while not explore(other, tasks, requests=(5, 17, 12, 30)[sessions % 4]):
        sessions += 1
    assert sessions >= 4
    assert groups(other) == whole


def test_easy_tasks_come_first_and_each_once(bench: Bench) -> None:
    explore(bench, prepare(bench, CHOICES["easy to hard"]))
    easy = sorted(range(TASKS), key=lambda i: -(i * 7 % TASKS))
    tried = [row["task_id"] for row in bench.table("groups")][:TASKS]
    order = {row["task_id"]: row["position"] for row in bench.table("tasks")}
    # 7 and 14 have a factor in common: equals keep the order of the set
    assert [order[task] for task in tried] == sorted(easy, key=lambda i: (-(i * 7 % TASKS), i))[: len(tried)]


def test_a_query_sees_the_steps_before_the_one_it_was_asked_for(bench: Bench) -> None:
    """What was tried gets no weight, asked every second step."""
    sql = "select task_id, 1.0 as weight from task_stats where groups = 0"
    bench.operators = []
    explore(bench, prepare(bench, {"tasksets": [weighted_by(sql, every=2)]}))
    tried: dict[int, set[str]] = {}
    for row in bench.table("groups"):
        tried.setdefault(row["step"], set()).add(row["task_id"])
    assert all(len(step) == 3 for step in tried.values())
    assert not tried[1] & tried[3] and not tried[2] & tried[3] and not tried[2] & tried[4]
    assert not (tried[1] | tried[2] | tried[3] | tried[4]) & tried[5]


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("select task_id from task_stats", "has no column 'weight'; it has task_id; write `select task_id"),
        (
            "select task_id, 'x' as weight from task_stats",
            "gives weights of type string; numbers are expected",
        ),
        ("select task_id, -1 as weight from task_stats", "the weight -1; allowed: 0 and more"),
        ("select task_id, 'nan'::double as weight from task_stats", "the weight nan; allowed: 0 and more"),
        ("select task_id, 0 as weight from task_stats", "none of the 14 tasks a weight above 0; let it keep"),
        (
            "select task_id, 1 as weight from task_stats, range(2)",
            "a task more than one row; group by task_id",
        ),
        ("select task_id, 1 as weight from experiences", "sums': curriculum.sql at step 1: .*experiences"),
    ],
)
def test_an_answer_without_weights_ends_the_run_with_its_reason(bench: Bench, sql: str, message: str) -> None:
    tasks = prepare(bench, {"tasksets": [weighted_by(sql)]})
    with pytest.raises(ConfigError, match=message):
        explore(bench, tasks)
    assert bench.table("groups") == []


def test_tasks_without_a_row_have_the_default_weight(bench: Bench) -> None:
    sql = "select task_id, 1000 as weight from task_stats where position < 2"
    bench.operators, bench.batch_size = [], 2
    explore(bench, prepare(bench, {"tasksets": [weighted_by(sql, default_weight=1e-6)]}))
    tried = Counter(row["task_id"] for row in bench.table("groups"))
    assert sorted(tried.values()) == [STEPS, STEPS]


def test_each_set_is_tried_with_its_own_number_of_rollouts_and_counted(bench: Bench) -> None:
    explore(bench, prepare(bench, CHOICES["weighted"]))
    sets = {row["task_id"]: row["taskset"] for row in bench.table("tasks")}
    rollouts = Counter(row["group_id"] for row in bench.table("experiences"))
    for row in bench.table("groups"):
        assert rollouts[row["group_id"]] == {"sums": 4, "more": 2}[sets[row["task_id"]]]
