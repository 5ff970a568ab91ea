"""docs/reference/sql.md names every view and column that there is,
and the queries of docs/howto/query.md run.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from trinity_data.schema import rows_to_table
from trinity_data.store.sql import BOUND_LATE, SqlSession, open_sql
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_data.store.views import JOINED, PLAIN

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reference" / "sql.md").read_text()
HOWTO = (DOCS / "howto" / "query.md").read_text()
QUESTIONS = dict(re.findall(r"^([A-Z][^\n]*\?)\n```sql\n(.*?)```", HOWTO, flags=re.DOTALL | re.MULTILINE))
QUERIES = list(QUESTIONS.values())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    return folder


@pytest.fixture(scope="module")
def session(run: Path) -> SqlSession:
    return open_sql([run])


def test_there_are_questions() -> None:
    assert len(QUERIES) == HOWTO.count("```sql") >= 20


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


@pytest.mark.parametrize("view", [*PLAIN, *JOINED, *BOUND_LATE])
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


ID = "explorer/grpo/0000001/00000/00"
ROLLOUTS = "How many rollouts of each step failed, and how many rollouts and rows did operators drop?"
ANSWERS = {
    "What became of everything that was generated?": [
        {"stage": "grpo", "step": 1, "generated": 4, "trained": 2, "dropped": 2, "stale": 0, "failed": 0,
         "waiting": 0},
        {"stage": "grpo", "step": 2, "generated": 2, "trained": 1, "dropped": 0, "stale": 0, "failed": 1,
         "waiting": 0},
    ],
    "Which operator drops most, and what does it say?": [
        {"operator": "reward_std_filter", "reason": "no variance", "rows": 2}
    ],
    ROLLOUTS: [
        {"step": 1, "rollouts": 4, "failed": 0, "dropped": 2, "dropped_in_part": 0, "rows": 4,
         "dropped_rows": 2},
        {"step": 2, "rollouts": 2, "failed": 1, "dropped": 0, "dropped_in_part": 0, "rows": 2,
         "dropped_rows": 0},
    ],
    "Which experiences did an operator drop, why, and what is their text?": [
        {"step": 1, "row_id": f"explorer/grpo/0000001/00001/00{rollout}/00", "reason": "no variance",
         "value": 0.0, "raw_reward": 1.0, "response_text": f"answer {rollout}"}
        for rollout in (0, 1)
    ],
    "Why do rollouts fail?": [{"error": "deadline passed", "rows": 1, "first": 2, "last": 2}],
    "How much does each update clip?": [
        {"step": 1, "importance_weight": 0.75, "clipped": 0.5, "experiences": 2}
    ],
    "What is the reward made of?": [
        {"step": 1, "part": "accuracy", "mean": 0.75},
        {"step": 2, "part": "accuracy", "mean": 0.5},
    ],
    "At which tokens did the trainer and the engine disagree most?": [
        {"experience_id": f"{ID}{row}/00", "position": place, "text": str(6 + place), "logprob": logprob,
         "recomputed_logprob": -0.5}
        for place, logprob in ((1, -0.25), (0, -0.5))
        for row in (0, 1)
    ],
    "By how much did each operator change the reward?": [
        {"step": 1, "position": 1, "operator": "reward_shaping_mapper", "rows": 2, "mean_change": 0.5,
         "changed": 2},
        {"step": 2, "position": 1, "operator": "reward_shaping_mapper", "rows": 1, "mean_change": 0.5,
         "changed": 1},
    ],
    "What does shaping do to the reward of each group?": [
        {"group_id": "explorer/grpo/0000001/00000", "raw": 0.5, "shaped": 1.0, "spread": 0.5},
        {"group_id": "explorer/grpo/0000002/00000", "raw": 1.0, "shaped": 1.5, "spread": 0.0},
    ],
}  # fmt: skip


@pytest.mark.parametrize("question", ANSWERS)
def test_a_small_run_has_the_answers_that_its_rows_give(small_run: Path, question: str) -> None:
    with open_sql([small_run]) as session:
        assert session.query(QUESTIONS[question]).to_pylist() == ANSWERS[question]


@pytest.mark.parametrize(
    ("question", "column", "expected"),
    [
        (
            "What did a step train, and which rows of the source weighed most in its loss?",
            "advantage",
            [-0.5, 0.5],
        ),
        ("Which tasks are solved how often?", "solved", [1.0, 1.0, 0.5, None]),
        ("Which tasks have become better since they were first tried?", "times", [1, 1, 1]),
        ("Which tasks were read and never tried?", "dropped_by", ["difficulty_filter", ""]),
        (
            "Which tasks did operators drop, why, and what is their text?",
            "reason",
            ["steps of the reference answer: above 2"],
        ),
    ],
)
def test_a_small_run_has_the_column_that_its_rows_give(
    small_run: Path, question: str, column: str, expected: list[object]
) -> None:
    with open_sql([small_run]) as session:
        assert session.query(QUESTIONS[question])[column].to_pylist() == expected


def test_rollouts_that_are_dropped_whole_and_in_part_are_counted_apart(tmp_path: Path) -> None:
    # of three rollouts of two turns the first loses one row, the second both
    turns = [
        {"experience_id": f"g/{rollout}/{turn}", "group_id": "g", "stage": "rl", "step": 1,
         "position": 0, "rollout": rollout, "turn": turn, "error": ""}
        for rollout in range(3) for turn in range(2)
    ]  # fmt: skip
    dropped = {"g/0/1", "g/1/0", "g/1/1"}
    outcomes = [
        {"experience_id": name, "group_id": "g", "stage": "rl", "step": 1, "kept": name not in dropped}
        for name in (row["experience_id"] for row in turns)
    ]
    store = Store.create_or_open(tmp_path / "store")
    tables = {"experiences": turns, "outcomes": outcomes}
    store.commit(Commit(tables={name: rows_to_table(name, rows) for name, rows in tables.items()}))
    store.close()
    with open_sql([tmp_path]) as session:
        assert session.query(QUESTIONS[ROLLOUTS]).to_pylist() == [
            {"step": 1, "rollouts": 3, "failed": 0, "dropped": 1, "dropped_in_part": 1, "rows": 6,
             "dropped_rows": 3}
        ]  # fmt: skip


def test_a_run_is_joined_with_a_table_of_ones_own_as_the_page_says(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = [
        block for block in re.findall(r"```python\n(.*?)```", HOWTO, re.DOTALL) if "labels.csv" in block
    ]
    (tmp_path / "labels.csv").write_text("experience_id,label\ne1,good\n")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(block.replace("checkpoints/project/name", str(run)), names)
    assert names["joined"].to_pylist() == [{"experience_id": "e1", "reward": 1.0, "label": "good"}]


def test_the_other_python_of_the_page_reads_a_run(small_run: Path) -> None:
    blocks = [
        block for block in re.findall(r"```python\n(.*?)```", HOWTO, re.DOTALL) if "labels.csv" not in block
    ]
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    for block in blocks:
        lines = block.replace("checkpoints/project/name", str(small_run)).splitlines()
        # a package that is not needed, and may not be there
        installed = [line for line in lines if "polars" not in line or find_spec("polars")]
        exec("\n".join(installed), names)
    assert {row["state"]: row["n"] for row in names["answer"].arrow().to_pylist()} == {
        "trained": 3,
        "dropped": 2,
        "failed": 1,
    }
    assert names["table"].to_pylist() == [{"step": 1}]
