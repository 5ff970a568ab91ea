from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from trinity_data.config import FormatConfig, TasksetConfig
from trinity_data.errors import ConfigError
from trinity_data.pipeline.task import build_task_rows, task_columns, tasks_from_table
from trinity_data.schema import TABLES


def build(rows: list[dict[str, Any]], *, name: str = "sums", **form: Any) -> pa.Table:
    config = TasksetConfig(
        name=name,
        path="x",
        split="train",
        format=FormatConfig(**form),
        default_workflow_type="simple_workflow",
    )
    return build_task_rows(
        config,
        pa.Table.from_pylist(rows),
        stage="rl",
        source="data",
        source_rows=[10 + i for i in range(len(rows))],
        first_position=64,
    )


def test_a_row_becomes_a_task_that_knows_where_it_came_from() -> None:
    (row,) = task_columns(build([{"q": "2+3?", "a": "#### 5"}], prompt_key="q", response_key="a")).to_pylist()
    assert row["messages"] == [{"role": "user", "content": "2+3?"}]
    assert (row["prompt"], row["answer"]) == ("2+3?", "#### 5")
    assert (row["source"], row["source_row"], row["position"], row["split"]) == ("data", 10, 64, "train")
    assert (row["workflow"], row["reward_fn"], row["kept"]) == ("simple_workflow", "", True)


def test_a_rows_own_system_prompt_workflow_and_reward_go_before_the_sets() -> None:
    rows = [
        {"prompt": "a", "response": "1", "sys": "Be brief.", "w": "math_workflow", "r": "format_reward"},
        {"prompt": "b", "response": "2", "sys": None, "w": None, "r": None},
    ]
    keys = {"system_prompt_key": "sys", "system_prompt": "Add.", "workflow_key": "w", "reward_fn_key": "r"}
    first, second = task_columns(build(rows, **keys)).to_pylist()
    assert first["messages"][0] == {"role": "system", "content": "Be brief."}
    assert second["messages"][0] == {"role": "system", "content": "Add."}
    assert (first["workflow"], first["reward_fn"]) == ("math_workflow", "format_reward")
    assert (second["workflow"], second["reward_fn"]) == ("simple_workflow", "")


def test_messages_are_taken_as_they_are_and_the_last_is_the_prompt() -> None:
    said = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "2+3?"},
    ]
    (row,) = task_columns(build([{"chat": said}], prompt_type="messages", messages_key="chat")).to_pylist()
    assert (row["messages"], row["prompt"], row["answer"]) == (said, "2+3?", "")


def test_an_id_is_of_the_content_alone() -> None:
    rows = [
        {"prompt": "a", "response": "1"},
        {"prompt": "a", "response": "2"},
        {"prompt": "a", "response": "1"},
    ]
    ids = build(rows)["task_id"].to_pylist()
    assert ids[0] == ids[2] != ids[1]
    assert build(rows)["task_id"].to_pylist() == ids
    assert build(rows, name="other")["task_id"].to_pylist()[0] != ids[0]


def test_the_sets_own_columns_stay_for_operators_and_leave_before_the_store() -> None:
    table = build([{"prompt": "a", "response": "1", "level": 3}])
    assert table["level"].to_pylist() == [3]
    assert task_columns(table).schema.names == TABLES["tasks"].names


def test_stored_rows_are_tasks_again() -> None:
    table = build([{"prompt": "a", "response": "1"}])
    (task,) = tasks_from_table(table)
    assert task.messages == ({"role": "user", "content": "a"},)
    assert (task.prompt, task.answer, task.taskset, task.workflow) == ("a", "1", "sums", "simple_workflow")


def test_a_missing_column_is_named_with_those_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"taskset 'sums': data has no column 'prompt'; it has promt \(did you mean"
    ):
        build([{"promt": "a"}])


def test_a_task_has_every_column_of_its_row() -> None:
    rows = [{"prompt": "a", "response": "1", "level": 3, "tests": ["x == 1"], "columns": "own"}]
    (task,) = tasks_from_table(build(rows))
    assert task.columns == rows[0]
