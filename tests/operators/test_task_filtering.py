from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trinity_data.config import FormatConfig, TasksetConfig
from trinity_data.dataset.reader import DatasetSpec, Source, dataset_spec
from trinity_data.dataset.task import build_task_rows, tasks_from_table
from trinity_operators.base import Column, Filter, FilterResult, Mapper, Operator
from trinity_operators.task_filtering import (
    CHUNK_ROWS,
    FilteredTasks,
    chunk_bounds,
    filter_tasks,
    read_and_filter,
    read_for_evaluation,
)


class Join(Mapper):
    reads = ("Body", "Question")
    writes = ("prompt",)

    def map(self, rows: pa.Table) -> Mapping[str, Column]:
        return {"prompt": [f"{row['Body']} {row['Question']}" for row in rows.to_pylist()]}


class Rewrite(Mapper):
    reads = ("answer", "Body")
    writes = ("answer", "Body")

    def map(self, rows: pa.Table) -> Mapping[str, Column]:
        return {
            "answer": [f"#### {answer}" for answer in rows["answer"].to_pylist()],
            "Body": [body.upper() for body in rows["Body"].to_pylist()],
        }


class Blank(Mapper):
    reads = ("prompt",)
    writes = ("prompt",)

    def map(self, rows: pa.Table) -> Mapping[str, Column]:
        return {"prompt": ["" if "2" in text else text for text in rows["prompt"].to_pylist()]}


class Capitals(Mapper):
    reads = ("prompt",)
    writes = ("prompt",)

    def map(self, rows: pa.Table) -> Mapping[str, Column]:
        return {"prompt": [text.upper() for text in rows["prompt"].to_pylist()]}


class Long(Filter):
    reads = ("prompt",)
    writes = ("length",)

    def apply(self, rows: pa.Table) -> FilterResult:
        length = np.array([len(text) for text in rows["prompt"].to_pylist()], dtype=np.float64)
        return FilterResult(length > 4, "short", scores={"length": length})


class ByLength(Mapper):
    reads = ("prompt", "length")
    writes = ("prompt",)

    def map(self, rows: pa.Table) -> Mapping[str, Column]:
        return {"prompt": [f"{row['prompt']} ({row['length']:g})" for row in rows.to_pylist()]}


class ByReward(Filter):
    reads = ("reward",)

    def apply(self, rows: pa.Table) -> FilterResult:
        return FilterResult(np.array([text == "high" for text in rows["reward"].to_pylist()]), "low")


def filtered(rows: list[dict[str, Any]], *operators: Operator, **form: Any) -> FilteredTasks:
    config = TasksetConfig(
        name="sums", path="x", format=FormatConfig(**form), default_workflow_type="simple_workflow"
    )
    numbers = list(range(len(rows)))
    built = build_task_rows(config, rows, stage="rl", source="data", source_rows=numbers, first_position=0)
    return filter_tasks(operators, built, stage="rl")


def test_rows_that_an_operator_makes_different_are_tasks_of_different_ids() -> None:
    rows = [{"Body": body, "Question": "How many?", "response": "1"} for body in ("Ann.", "Bob.", "Ann.")]
    result = filtered(rows, Join(), prompt_key="Question")
    assert result.tasks["prompt"].to_pylist() == ["Ann. How many?", "Bob. How many?", "Ann. How many?"]
    ids = result.tasks["task_id"].to_pylist()
    assert len(set(ids)) == 3
    assert result.decisions["row_id"].to_pylist() == ids
    (before,) = set(filtered(rows[:1], prompt_key="Question").tasks["task_id"].to_pylist())
    assert before not in ids


def test_what_a_mapper_writes_is_what_the_task_says() -> None:
    rows = [{"Body": "ann", "prompt": "How many?", "response": 1}]
    (task,) = tasks_from_table(filtered(rows, Rewrite()).tasks)
    assert (task.answer, task.columns["Body"], task.columns["response"]) == ("#### 1", "ANN", 1)


def test_a_row_that_cannot_be_tried_is_dropped_before_the_operators_on_record() -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "1+1?", "response": "2"},
        {"prompt": None, "response": "2"},
        {"prompt": "12?", "response": "3"},
    ]
    result = filtered(rows, Blank())
    assert result.tasks["kept"].to_pylist() == [True, False, False]
    assert result.tasks["dropped_by"].to_pylist() == ["", "trainable", "trainable"]
    decisions = [row for row in result.decisions.to_pylist() if row["operator"] == "trainable"]
    assert [(row["reason"], row["position"], row["kept"]) for row in decisions] == [
        ("column 'prompt' holds no prompt: null", None, False),
        ("the operators left an empty prompt", None, False),
    ]
    assert [row["row_id"] for row in decisions] == result.tasks["task_id"].to_pylist()[1:]
    assert result.operators["rows_in"].to_pylist() == [2]


def test_rows_that_no_operator_changes_are_stored_as_beside_changed_ones() -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "1+1?", "response": "2", "level": 1.5},
        {"prompt": None, "response": "2", "level": None},
        {"prompt": "12 + 3?", "response": "3", "level": 2.5},
        {"prompt": "what is 4?", "response": "4", "level": 2.5},
    ]
    beside, alone = filtered(rows, Capitals(), Long()), filtered(rows[:3], Capitals(), Long())
    assert beside.tasks["prompt"].to_pylist()[3] == "WHAT IS 4?"
    assert beside.tasks.slice(0, 3).equals(alone.tasks)
    assert alone.tasks["scores"].to_pylist() == [[("length", 4.0)], None, [("length", 7.0)]]
    assert alone.tasks["dropped_by"].to_pylist() == ["Long", "trainable", ""]


def test_a_chunk_of_nothing_but_such_rows_is_dropped() -> None:
    result = filtered([{"prompt": "", "response": "1"}], Blank(), Long())
    assert result.tasks["dropped_by"].to_pylist() == ["trainable"]


def test_a_sets_own_column_may_have_the_name_of_a_reward() -> None:
    rows = [{"prompt": name, "response": "1", "reward": name, "advantage": [1]} for name in ("high", "low")]
    result = filtered(rows, ByReward())
    assert result.tasks["kept"].to_pylist() == [True, False]
    assert json.loads(result.tasks["columns"][0].as_py())["advantage"] == [1]


class FromOlympiads(Mapper):
    """Reads and writes columns that a task set often has, and that the `tasks` table has too."""

    reads = ("source", "position")
    writes = ("source",)

    def map(self, rows: pa.Table) -> Mapping[str, Column]:
        return {"source": [f"{row['source']}, no. {row['position']}" for row in rows.to_pylist()]}


def test_operators_read_a_sets_own_column_that_has_the_name_of_one_of_tasks() -> None:
    own = {"source": "olympiads", "position": 7, "kept": "yes", "columns": [1], "task_id": "HumanEval/1"}
    (task,) = filtered([{"prompt": "a", "response": "1"} | own], FromOlympiads()).tasks.to_pylist()
    assert (task["source"], task["position"], task["kept"]) == ("data", 0, True)
    assert task["task_id"] != "HumanEval/1"
    columns = {"prompt": "a", "response": "1"} | own | {"source": "olympiads, no. 7"}
    assert json.loads(task["columns"]) == columns


def test_an_evaluation_asks_what_training_asks_and_drops_nothing(tmp_path: Path) -> None:
    rows = [{"q": "1+1?", "a": 0}, {"q": "1 + 1?", "a": 2.5}, {"q": "?", "a": None}]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = TasksetConfig(
        name="held_out",
        path=str(tmp_path),
        split="test",
        format=FormatConfig(prompt_key="{q}", response_key="a"),
    )
    source = Source(DatasetSpec(str(tmp_path), None, "test"))
    tasks, left_out = read_for_evaluation(config, source, [Long(), ByLength()], stage="rl")
    assert [(task.prompt, task.answer) for task in tasks] == [("1+1? (4)", "0"), ("1 + 1? (6)", "2.5")]
    assert tasks[0].messages == ({"role": "user", "content": "1+1? (4)"},)
    assert left_out == ["column 'a' holds no answer"]


def test_a_row_that_cannot_be_read_is_on_record_where_bad_rows_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "words.jsonl"
    file.write_text('{"prompt": "2+3?"}\n{"prompt": \n{"prompt": "1+1?"}\n')
    config = TasksetConfig(
        name="sums", path=str(file), default_workflow_type="simple_workflow", on_bad_row="skip"
    )
    source = Source(dataset_spec(config))
    (result,) = read_and_filter(config, source, range(source.num_rows), [], stage="rl")
    assert result.tasks["source_row"].to_pylist() == [0, 1, 2]
    assert result.tasks["kept"].to_pylist() == [True, False, True]
    assert result.tasks["dropped_by"].to_pylist() == ["", "trainable", ""]
    (decision,) = result.decisions.to_pylist()
    assert decision["reason"].startswith(f"{file}:2: not JSON: ")


def test_chunks_are_consecutive_and_the_last_is_shorter() -> None:
    first, end = 2 * CHUNK_ROWS, 4 * CHUNK_ROWS + 3
    bounds = [(2 * CHUNK_ROWS, 3 * CHUNK_ROWS), (3 * CHUNK_ROWS, 4 * CHUNK_ROWS), (4 * CHUNK_ROWS, end)]
    assert list(chunk_bounds(first, end)) == bounds
    assert list(chunk_bounds(5, 5)) == []
