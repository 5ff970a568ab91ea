"""docs/sql.md names every view and column that there is, and its queries run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trinity_data.schema import rows_to_table
from trinity_data.store.commit import Commit
from trinity_data.store.sql import SqlSession, open_sql
from trinity_data.store.store import Store
from trinity_data.store.views import JOINED, PLAIN

PAGE = (Path(__file__).parents[2] / "docs" / "sql.md").read_text()
QUERIES = re.findall(r"```sql\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> SqlSession:
    folder = tmp_path_factory.mktemp("run")
    rows = [
        {
            "experience_id": f"e{number}",
            "task_id": "t",
            "group_id": "g",
            "stage": "rl",
            "step": 1,
            "position": 0,
            "rollout": number,
            "turn": 0,
            "model_version": 0,
            "prompt_length": 1,
            "response_length": 2,
            "token_ids": [1, 2, 3],
            "logprobs": [-0.5, -0.5],
            "action_mask": [True, True],
            "response_text": f"answer {number}",
            "reward": float(number),
            "error": "",
        }
        for number in range(2)
    ]
    outcomes = [{"experience_id": f"e{number}", "kept": True, "advantage": 0.5} for number in range(2)]
    batch = {"step": 1, "experience_id": "e1", "logprobs": [-0.25, -0.5]}
    store = Store.create_or_open(folder / "store")
    store.commit(
        Commit(
            tables={
                "experiences": rows_to_table("experiences", rows),
                "outcomes": rows_to_table("outcomes", outcomes),
                "steps": rows_to_table("steps", [{"step": 1, "stage": "rl", "seconds": 2.0}]),
            }
        )
    )
    store.form_batch("rl", 1, ["e0", "e1"])
    store.commit(Commit(tables={"batches": rows_to_table("batches", [batch])}))
    store.close()
    return open_sql([folder])


def test_there_are_questions() -> None:
    assert len(QUERIES) >= 10


@pytest.mark.parametrize("query", QUERIES, ids=range(len(QUERIES)))
def test_each_query_of_the_page_runs(session: SqlSession, query: str) -> None:
    assert session.query(query).num_columns > 1


def test_the_answers_to_a_few_questions_are_right(session: SqlSession) -> None:
    rewards, _, _, _, variance, staleness, mismatch, *_, best, times = (
        session.query(query).to_pylist() for query in QUERIES
    )
    assert rewards == [{"step": 1, "raw": 0.5, "shaped": 0.5, "experiences": 2}]
    assert variance == [{"step": 1, "without_variance": 0.0}]
    assert staleness == [{"trained_step": 1, "mean": 0.0, "most": 0}]
    assert mismatch == [{"step": 1, "mean": 0.125, "largest": 0.25}]
    assert best == [{"task_id": "t", "best": "answer 1", "worst": "answer 0"}]
    assert times == [{"step": 1, "training": 2.0, "operators": None}]


@pytest.mark.parametrize("view", [*PLAIN, *JOINED])
def test_each_view_is_on_the_page_with_all_its_columns(session: SqlSession, view: str) -> None:
    documented = set(re.findall(r"^\| (\w+) \|", section(view), flags=re.MULTILINE)) - {"column"}
    if view == "experiences":
        documented |= set(re.findall(r"^\| (\w+) \|", section("rollouts"), flags=re.MULTILINE)) - {"column"}
    columns = session.query(f"SELECT column_name FROM (DESCRIBE {view})")["column_name"].to_pylist()
    assert documented == set(columns)


def section(view: str) -> str:
    found = re.search(rf"^### {view}\n(.*?)(?=^##)", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert found is not None, f"{view} is not on the page"
    return found[1]
