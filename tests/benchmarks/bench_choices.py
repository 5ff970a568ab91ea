"""How long does a step wait for its tasks, chosen from so many?

Each selector chooses 64 tasks of a pool that is in memory. A step of the difficulty selector learns from
the step before; a query is asked of a sealed store with the tasks and 200 explored steps.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tests.benchmarks.measure import in_turns, show, show_machine
from trinity_data.config import CurriculumConfig, SelectorArgs
from trinity_data.schema import TABLES, experience_id, group_id, rows_to_table
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_explorer.curriculum.difficulty import DifficultySelector, StepRates
from trinity_explorer.curriculum.history import History
from trinity_explorer.curriculum.pool import TaskPool
from trinity_explorer.curriculum.selectors import (
    EasyToHardSelector,
    RandomSelector,
    Request,
    Selector,
    WeightSelector,
)

BATCH, ROLLOUTS, EXPLORED = 64, 8, 200
SQL = "select task_id, 0.1 + coalesce(pass_rate * (1 - pass_rate), 0.25) as weight from task_stats"


def tasks(count: int) -> pa.Table:
    """Rows of `tasks` as far as a choice reads them."""
    numbers = np.arange(count)
    columns = {
        "task_id": pa.array([f"{number:032x}" for number in numbers]),
        "stage": pa.array(["rl"] * count),
        "taskset": pa.array(["sums"] * count),
        "position": pa.array(numbers),
        "kept": pa.array([True] * count),
        "prompt": pa.array([f"What is {number} + 1?" for number in numbers]),
    }
    return pa.table(
        [columns.get(field.name, pa.nulls(count, field.type)) for field in TABLES["tasks"]],
        schema=TABLES["tasks"],
    )


def explored_step(step: int, num_tasks: int) -> Commit:
    """64 groups of eight rollouts, half of which are right."""
    random = np.random.default_rng(step)
    groups, rows = list[dict[str, object]](), list[dict[str, object]]()
    for position, number in enumerate(random.choice(num_tasks, BATCH, replace=False)):
        name = group_id("explorer", "rl", step, position)
        place = {
            "group_id": name,
            "stage": "rl",
            "step": step,
            "position": position,
            "task_id": f"{number:032x}",
        }
        groups.append(place)
        rows += [
            place
            | {"experience_id": experience_id(name, rollout), "rollout": rollout, "turn": 0, "error": "",
               "model_version": step - 1, "response_length": 100, "reward": float(random.integers(2))}
            for rollout in range(ROLLOUTS)
        ]  # fmt: skip
    outcomes = [
        {"experience_id": row["experience_id"], "stage": "rl", "step": step, "kept": True, "advantage": 0.5}
        for row in rows
    ]
    made = {"groups": groups, "experiences": rows, "outcomes": outcomes}
    return Commit(tables={name: rows_to_table(name, each) for name, each in made.items()})


def selectors(pool: TaskPool, store: Store) -> dict[str, Selector]:
    random = np.random.default_rng(0)
    weak = random.random(len(pool)) / 2
    features = np.column_stack([weak, weak + 0.4])

    def learn(first: int, end: int) -> Iterator[StepRates]:
        for step in range(first, end):
            places = np.random.default_rng(step).choice(len(pool), BATCH, replace=False)
            yield StepRates(places, random.random(BATCH))

    def difficulty(**values: Any) -> Selector:
        return DifficultySelector(features, SelectorArgs(**values), learn, first_step=1, seed=0)

    weights = random.random(len(pool))
    history = History(store, "rl", "sums", "explorer", lambda step: step - 1)
    curriculum = CurriculumConfig(sql=SQL)
    return {
        "random": RandomSelector(len(pool), seed=0),
        "offline_easy2hard": EasyToHardSelector(features),
        "difficulty_based": difficulty(),
        "difficulty_based, without drawing": difficulty(do_sample=False),
        "difficulty_based, tau 0.1": difficulty(tau=0.1),
        "curriculum, weights as they were": WeightSelector(
            lambda step: weights, first_step=1, every=10, seed=0
        ),
        "curriculum, the query asked": WeightSelector(
            lambda step: history.weights(pool, curriculum, EXPLORED + 1), first_step=1, every=1, seed=0
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    show_machine()
    with tempfile.TemporaryDirectory() as folder:
        store = Store.create_or_open(Path(folder) / "store")
        rows = tasks(arguments.tasks)
        store.commit(Commit(tables={"tasks": rows}))
        for step in range(1, EXPLORED + 1):
            store.commit(explored_step(step, arguments.tasks))
        store.seal()
        pool = TaskPool.from_rows(rows)
        steps = dict.fromkeys(chosen := selectors(pool, store), 1)

        def one(name: str, selector: Selector) -> Callable[[], object]:
            def choose() -> None:
                steps[name] += 1
                selector.choose(Request(steps[name], BATCH, num_taken=BATCH * steps[name]))

            return choose

        times = in_turns({name: one(name, selector) for name, selector in chosen.items()}, arguments.rounds)
        places = np.random.default_rng(1).choice(arguments.tasks, BATCH)
        times |= in_turns({"the rows of 64 tasks": lambda: pool.tasks(places)}, arguments.rounds)
        show(times, ours="difficulty_based", rows=BATCH)
        store.close()


if __name__ == "__main__":
    main()
