"""The views on yield, by numbers that can be computed by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_data.schema import rows_to_table
from trinity_data.store.sql import open_sql
from trinity_data.store.store import Store
from trinity_data.store.types import Commit

LENGTHS = (10, 20, 30, 40)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four rollouts of two tasks; the first two pass both operators and are trained, the third is dropped
    by the second operator, the fourth failed.
    """
    folder = tmp_path_factory.mktemp("yields")
    rows = [
        {
            "experience_id": f"e{number}",
            "task_id": f"t{number // 2}",
            "group_id": "g",
            "stage": "rl",
            "step": 1,
            "position": 0,
            "turn": 0,
            "rollout": number,
            "response_length": length,
            "reward": 1.0,
            "error": "broke" if number == 3 else "",
            # of the third, an attempt had failed before
            "info": '{"failed_tokens": 7}' if number == 2 else "{}",
        }
        for number, length in enumerate(LENGTHS)
    ]
    outcomes = [{"experience_id": f"e{n}", "stage": "rl", "step": 1, "kept": n < 2} for n in range(3)]
    common = {"stage": "rl", "step": 1, "row_kind": "experience"}
    decisions = [
        *(common | {"row_id": f"e{n}", "operator": "a", "position": 0, "kept": True} for n in range(3)),
        *(
            common
            | {"row_id": f"e{n}", "operator": "b", "position": 1, "kept": n < 2, "reason": "long" * (n > 1)}
            for n in range(3)
        ),
        *(
            {
                "stage": "rl",
                "row_kind": "task",
                "row_id": task,
                "operator": "c",
                "position": 0,
                "kept": task != "t2",
            }
            | {"reason": "hard" if task == "t2" else ""}
            for task in ("t0", "t1", "t2")
        ),
    ]
    counts = [
        {
            "stage": "rl",
            "step": 1,
            "pipeline": "experience",
            "operator": "a",
            "position": 0,
            "rows_in": 3,
            "rows_out": 3,
            "microseconds": 5e5,
            "metrics": [("tokens", 7.0), ("requests", 3.0)],
        },
        {
            "stage": "rl",
            "step": 1,
            "pipeline": "experience",
            "operator": "b",
            "position": 1,
            "rows_in": 3,
            "rows_out": 2,
            "microseconds": 1e6,
        },
        *(
            {
                "stage": "rl",
                "pipeline": "task",
                "operator": "c",
                "position": 0,
                "rows_in": rows_in,
                "rows_out": rows_out,
                "microseconds": 1e6,
            }
            for rows_in, rows_out in ((2, 2), (1, 0))
        ),
    ]
    batches = [
        {
            "stage": "rl",
            "step": 1,
            "experience_id": "e0",
            "advantage": -0.5,
            "clipped": 0.5,
            "loss_share": -0.25,
        },
        {
            "stage": "rl",
            "step": 1,
            "experience_id": "e1",
            "advantage": 1.0,
            "clipped": 0.0,
            "loss_share": 0.5,
        },
    ]
    tables = {
        "experiences": rows,
        "outcomes": outcomes,
        "decisions": decisions,
        "operators": counts,
        "batches": batches,
    }
    store = Store.create_or_open(folder / "store")
    store.commit(Commit(tables={name: rows_to_table(name, each) for name, each in tables.items()}))
    store.close()
    return folder


def test_the_yield_of_an_operator_is_what_training_got_of_the_rows_it_let_through(run: Path) -> None:
    with open_sql([run]) as session:
        found = {
            row["operator"]: row
            for row in session.query("select * from operator_yield").to_pylist(maps_as_pydicts="strict")
        }
    # signal: 0.5 x 10 x (1 - 0.5) + 1 x 20
    after = {
        "trained_rows": 2,
        "mean_abs_advantage": 0.75,
        "clipped": 0.25,
        "loss_share": 0.75,
        "signal": 22.5,
    }
    assert {**found["a"], **after} == found["a"] and {**found["b"], **after} == found["b"]
    spent = (
        "rows_in",
        "rows_out",
        "seconds",
        "tokens_spent",
        "requests_spent",
        "rollout_tokens",
        "dropped_tokens",
    )
    assert [found["a"][name] for name in spent] == [3, 3, 0.5, 7.0, 3.0, 60, 0]
    assert [found["b"][name] for name in spent] == [3, 2, 1.0, 0.0, 0.0, 60, 30]
    assert (found["a"]["reasons"], found["b"]["reasons"]) == (None, {"long": 1})


def test_the_yield_of_a_task_operator_is_of_the_rollouts_of_its_tasks(run: Path) -> None:
    with open_sql([run]) as session:
        (found,) = session.query("select * from operator_yield where pipeline = 'task'").to_pylist(
            maps_as_pydicts="strict"
        )
    assert (found["step"], found["rows_in"], found["rows_out"], found["seconds"]) == (None, 3, 2, 2.0)
    assert (found["rollout_tokens"], found["dropped_tokens"], found["signal"]) == (100, 0, 22.5)
    assert found["reasons"] == {"hard": 1}


def test_a_step_says_how_many_rollout_tokens_a_unit_of_signal_cost(run: Path) -> None:
    with open_sql([run]) as session:
        (found,) = session.query("select * from step_yield").to_pylist()
    assert found == {
        "stage": "rl",
        "step": 1,
        "rows": 4,
        "rollout_tokens": 107,
        "dropped_tokens": 30,
        "failed_tokens": 47,
        "trained_rows": 2,
        "trained_tokens": 30,
        "mean_abs_advantage": 0.75,
        "clipped": 0.25,
        "signal": 22.5,
        "tokens_per_signal": pytest.approx(107 / 22.5),
        "operator_seconds": 1.5,
        "tokens_spent": 7.0,
        "requests_spent": 3.0,
    }
