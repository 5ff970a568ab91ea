"""`task_stats` counts what became of each task; a choice of tasks sees what had come before its step."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_data.errors import StoreError
from trinity_data.schema import experience_id, group_id, rows_to_table
from trinity_data.store.snapshot import take_snapshot
from trinity_data.store.sql import SqlSession, open_sql
from trinity_data.store.store import Store
from trinity_data.store.task_stats import before_step
from trinity_data.store.types import Commit


def task(task_id: str, *, stage: str = "rl", taskset: str = "sums", kept: bool = True) -> dict[str, object]:
    scores = [("difficulty", 0.5)] if task_id == "a" else []
    return {
        "task_id": task_id, "stage": stage, "taskset": taskset, "position": "abcd".index(task_id),
        "kept": kept, "scores": scores,
    }  # fmt: skip


def group(step: int, task_id: str, rewards: list[float | None], *, explorer: str = "explorer") -> Commit:
    """A group whose rollouts have these rewards; None is a rollout that failed."""
    name = group_id(explorer, "rl", step, "abcd".index(task_id))
    place = {"group_id": name, "stage": "rl", "step": step, "task_id": task_id, "position": 0}
    rows = [
        place | {"experience_id": experience_id(name, number), "rollout": number, "turn": 0, "reward": reward,
                 "model_version": step - 1, "response_length": 10, "error": "late" if reward is None else ""}
        for number, reward in enumerate(rewards)
    ]  # fmt: skip
    outcomes = [
        {"experience_id": row["experience_id"], "group_id": name, "stage": "rl", "step": step, "kept": True,
         "advantage": -0.5 if row["reward"] == 0 else 1.5, "dropped_by": ""}
        for row in rows if row["reward"] is not None
    ]  # fmt: skip
    return Commit(
        tables={
            "groups": rows_to_table("groups", [place]),
            "experiences": rows_to_table("experiences", rows),
            "outcomes": rows_to_table("outcomes", outcomes),
        }
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    store = Store.create_or_open(folder / "store")
    tasks = [
        task("a"),
        task("b"),
        task("c", kept=False),
        task("d", taskset="words"),
        task("a", stage="later"),
    ]
    store.commit(Commit(tables={"tasks": rows_to_table("tasks", tasks)}))
    store.commit(group(1, "a", [1.0, 0.0, None]))
    store.commit(group(2, "a", [0.25]))
    store.commit(group(2, "d", [1.0]))
    store.commit(group(3, "b", [1.0, 1.0]))
    store.commit(group(1, "b", [0.0], explorer="other"))
    for step, ids in ((1, ["explorer/rl/0000001/00000/000/00"]), (2, ["explorer/rl/0000002/00000/000/00"])):
        store.form_batch("rl", step, ids)
        rows = [{"stage": "rl", "step": step, "experience_id": name} for name in ids]
        store.commit(Commit(tables={"batches": rows_to_table("batches", rows)}))
    store.close()
    return folder


def choice(run: Path, step: int, *, trained: int = 0) -> SqlSession:
    where = before_step(step, stage="rl", taskset="sums", explorer="explorer", trained=trained)
    return SqlSession({"run": take_snapshot(run / "store")}, 60, "1GB", None, where=where)


def test_each_kept_task_has_a_row_with_its_counts(run: Path) -> None:
    with open_sql([run]) as session:
        rows = session.query(
            "select * exclude (scores) from task_stats order by stage desc, task_id"
        ).to_pylist()
        scores = session.query("select scores['difficulty'] as d from task_stats where task_id = 'a'")
    keys = ("stage", "task_id", "groups", "rollouts", "failed", "mean_reward", "pass_rate", "last_step")
    assert [tuple(row[key] for key in keys) for row in rows] == [
        ("rl", "a", 2, 3, 1, pytest.approx(1.25 / 3), pytest.approx(1 / 3), 2),
        ("rl", "b", 2, 3, 0, pytest.approx(2 / 3), pytest.approx(2 / 3), 3),
        ("rl", "d", 1, 1, 0, 1.0, 1.0, 2),
        ("later", "a", 0, 0, 0, None, None, None),
    ]
    assert [(row["last_version"], row["response_tokens"], row["times_trained"]) for row in rows] == [
        (1, 40, 2), (2, 30, 0), (1, 10, 0), (None, 0, 0)
    ]  # fmt: skip
    # advantages 1.5, −0.5 and 1.5
    assert rows[0]["mean_abs_advantage"] == pytest.approx(3.5 / 3)
    assert scores["d"].to_pylist() == [0.5, 0.5]


def test_a_choice_sees_its_task_set_and_its_explorers_earlier_steps_alone(run: Path) -> None:
    query = "select task_id, groups, rollouts, times_trained from task_stats order by task_id"
    with choice(run, 3, trained=1) as session:
        assert [tuple(row.values()) for row in session.query(query).to_pylist()] == [
            ("a", 2, 3, 1),
            ("b", 0, 0, 0),
        ]
        assert session.query("select max(step) as step from rollouts")["step"].to_pylist() == [2]
    with choice(run, 1) as session:
        assert [tuple(row.values()) for row in session.query(query).to_pylist()] == [
            ("a", 0, 0, 0),
            ("b", 0, 0, 0),
        ]


def test_a_choice_sees_no_table_whose_rows_come_at_any_time(run: Path) -> None:
    with choice(run, 3) as session:
        for view in ("experiences", "events", "state_changes", "model_versions"):
            with pytest.raises(StoreError, match=f"{view} does not exist"):
                session.query(f"from {view}")


def test_over_several_runs_the_view_names_the_run(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    Store.create_or_open(other / "store").close()
    with open_sql([run, other]) as session:
        assert session.query("select distinct run from task_stats")["run"].to_pylist() == [run.name]
