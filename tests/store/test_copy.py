from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from trinity_data.errors import ConfigError
from trinity_data.schema import rows_to_table
from trinity_data.store.commit import Commit
from trinity_data.store.copy import copy_experiences
from trinity_data.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    row: dict[str, object] = {
        "experience_id": "a", "group_id": "g", "task_id": "t", "stage": "s", "step": 1, "position": 0, "rollout": 0,
        "turn": 0, "token_ids": [1, 2, 3], "logprobs": [-0.5, -0.25], "reward": 1.5, "error": "",
    }  # fmt: skip
    store = Store.create_or_open(tmp_path / "store")
    store.commit(Commit(tables={"experiences": rows_to_table("experiences", [row])}))
    return store


def test_the_sqlite_copy_has_typed_columns_and_keeps_tokens_and_logprobs(
    store: Store, tmp_path: Path
) -> None:
    target = copy_experiences(store, "sqlite:///gsm8k.db", tmp_path / "buffer")
    with sqlite3.connect(target) as connection:
        row = connection.execute(
            "SELECT reward, typeof(reward), token_ids, logprobs FROM experiences"
        ).fetchall()
    assert row == [(1.5, "real", "[1, 2, 3]", "[-0.5, -0.25]")]


def test_the_line_copy_can_be_read_back(store: Store, tmp_path: Path) -> None:
    target = copy_experiences(store, "experience_buffer.jsonl", tmp_path / "buffer")
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["token_ids"] for row in rows] == [[1, 2, 3]]


def test_a_copy_is_renewed_whole(store: Store, tmp_path: Path) -> None:
    for _ in range(2):
        target = copy_experiences(store, "sqlite:///gsm8k.db", tmp_path / "buffer")
    with sqlite3.connect(target) as connection:
        assert connection.execute("SELECT count(*) FROM experiences").fetchall() == [(1,)]


def test_another_kind_of_path_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sqlite"):
        copy_experiences(store, "duckdb:///x.db", tmp_path)
