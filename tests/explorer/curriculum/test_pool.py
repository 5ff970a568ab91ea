from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest

from trinity_data.errors import ConfigError
from trinity_data.schema import rows_to_table
from trinity_explorer.curriculum.pool import TaskPool


def rows(*columns: dict[str, object], scores: dict[int, float] | None = None) -> pa.Table:
    """Tasks t0, t1, …, the last position first; every third is dropped."""
    records = [
        {
            "task_id": f"t{number}", "taskset": "sums", "position": number, "answer": "",
            "kept": number % 3 != 2,
            "prompt": f"What is {number}?", "messages": [{"role": "user", "content": f"What is {number}?"}],
            "workflow": "w", "reward_fn": "", "columns": json.dumps(of_row),
            "scores": [("difficulty", scores[number])] if scores and number in scores else [],
        }
        for number, of_row in enumerate(columns)
    ]  # fmt: skip
    return rows_to_table("tasks", records[::-1])


def test_a_pool_has_kept_tasks_in_their_order_and_gives_them_by_place() -> None:
    pool = TaskPool.from_rows(rows(*({} for _ in range(6))))
    assert pool.rows["task_id"].to_pylist() == ["t0", "t1", "t3", "t4"]
    assert len(pool) == 4
    assert [task.prompt for task in pool.tasks(np.array([2, 0, 2]))] == [
        "What is 3?",
        "What is 0?",
        "What is 3?",
    ]
    assert pool.tasks(np.empty(0, np.int64)) == []
    assert pool.places(pa.array(["t4", "t2", "t0"])).tolist() == [3, -1, 0]


@pytest.mark.parametrize("size", [3, 30])
def test_places_of_few_and_of_many_tasks_are_the_same(size: int) -> None:
    pool = TaskPool.from_rows(rows(*({} for _ in range(size))))
    assert pool.places(pa.array(["t1", "t0", "t1", "t2", "t9x"])).tolist() == [1, 0, 1, -1, -1]
    assert pool.places(pa.chunked_array([["t1"], ["t0"]])).tolist() == [1, 0]
    assert pool.places(pa.array([], pa.string())).tolist() == []


def test_features_are_columns_of_the_set_or_scores_of_operators() -> None:
    table = rows({"easy": 0.5, "steps": "3"}, {"easy": 1, "steps": "2"}, scores={0: 0.25, 1: 0.75})
    pool = TaskPool.from_rows(table, feature_keys=["easy", "steps", "difficulty"])
    assert pool.features.tolist() == [[0.5, 3.0, 0.25], [1.0, 2.0, 0.75]]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"easy": "very"}, "task t1 holds 'very' under 'easy', which is no number"),
        ({"easy": None}, "task t1 holds None under 'easy', which is no number"),
        ({"easyness": 1.0}, r"task t1 has no 'easy'; it has easyness \(did you mean 'easyness'\?\)"),
    ],
)
def test_a_task_without_a_number_is_named_with_what_it_has(columns: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TaskPool.from_rows(rows({"easy": 0.5}, columns), feature_keys=["easy"])


def test_a_score_that_some_tasks_lack_is_named() -> None:
    with pytest.raises(ConfigError, match="task t1 has no 'difficulty'"):
        TaskPool.from_rows(rows({}, {}, scores={0: 0.5}), feature_keys=["difficulty"])
