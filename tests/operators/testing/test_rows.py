"""Rows for tests of operators: made ones fit their schema, those of a file get ids."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import trinity_data
from trinity_data.cli.printing import Format, write_answer
from trinity_data.errors import ConfigError
from trinity_data.schema import EXPERIENCES, TASKS
from trinity_operators.registry import OPERATORS
from trinity_operators.testing.rows import made_rows, read_rows, row_kind_of


def test_made_experiences_are_consistent_with_themselves() -> None:
    rows = made_rows("experience", ["difficulty"])
    assert rows.column_names == [*EXPERIENCES.names, "difficulty"]
    for row in rows.to_pylist():
        assert len(row["token_ids"]) == row["prompt_length"] + row["response_length"]
        assert len(row["logprobs"]) == len(row["action_mask"]) == row["response_length"]
    assert rows["difficulty"].type == "double"
    spread = [np.std(rows["reward"].to_pylist()[start : start + 4]) for start in (0, 4, 8)]
    assert spread[1] == 0 and spread[0] > 0 and spread[2] > 0


def test_made_texts_are_repeated_within_groups_and_across_them() -> None:
    rows = made_rows("experience")
    texts = rows["response_text"].to_pylist()
    assert [texts[start] == texts[start + 1] for start in (0, 4, 8)] == [True] * 3
    assert texts[2] == texts[6] == texts[10]
    assert len(set(texts)) == 7
    prompts = made_rows("task")["prompt"].to_pylist()
    assert prompts[2] == prompts[8] and len(set(prompts)) == 11


def test_times_that_sql_wrote_as_text_are_read_back(tmp_path: Path, small_run: Path) -> None:
    stored = trinity_data.open(small_run).sql("select * from rollouts").arrow()
    write_answer(stored, Format.JSON, tmp_path / "stored.jsonl")
    rows = read_rows(tmp_path / "stored.jsonl", "experience")
    assert rows["started_at"].type == EXPERIENCES.field("started_at").type
    assert rows["started_at"].to_pylist() == stored["started_at"].to_pylist()
    assert rows["token_ids"].to_pylist() == stored["token_ids"].to_pylist()


def test_made_tasks_have_text_in_a_column_of_the_set() -> None:
    rows = made_rows("task", ["level"])
    assert rows.column_names == [*TASKS.names, "level"]
    assert rows["level"].to_pylist()[:2] == ["level 0", "level 1"]


def test_the_kind_of_rows_follows_from_what_is_read() -> None:
    kinds = {
        name: row_kind_of(OPERATORS[name]())
        for name in ("difficulty_filter", "prompt_length_filter", "reward_filter", "grpo_advantage")
    }
    assert [*kinds.values()] == ["task", "task", "experience", "experience"]


def test_rows_of_a_file_have_the_types_of_the_table_and_ids(tmp_path: Path) -> None:
    lines = [{"reward": 1, "metrics": {"accuracy": 0.5}, "extra": "a"}, {"reward": None, "extra": "b"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    rows = read_rows(tmp_path / "rows.jsonl", "experience")
    assert rows.to_pylist(maps_as_pydicts="strict") == [
        {"reward": 1.0, "metrics": {"accuracy": 0.5}, "extra": "a", "experience_id": "row-00000"},
        {"reward": None, "metrics": None, "extra": "b", "experience_id": "row-00001"},
    ]


def test_a_file_that_does_not_fit_is_named_with_its_column(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"reward": "much"}')
    with pytest.raises(ConfigError, match=r"rows\.jsonl: column 'reward'"):
        read_rows(tmp_path / "rows.jsonl", "experience")
    with pytest.raises(ConfigError, match=r"there is no file '.*nothing\.jsonl'"):
        read_rows(tmp_path / "nothing.jsonl", "experience")
