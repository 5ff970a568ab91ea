from __future__ import annotations

import json

import pyarrow as pa
import pytest

from trinity_data.schema import (
    TABLES,
    content_id,
    experience_id,
    filled,
    group_id,
    is_whole_in_row,
    message_from_row,
    message_row,
    rows_to_table,
    values_of,
)


def test_a_missing_field_is_null_and_types_are_the_schemas() -> None:
    row = {"experience_id": "a", "token_ids": [1, 2], "reward": 1, "metrics": [("accuracy", 1.0)]}
    table = rows_to_table("experiences", [row])
    assert table.schema.equals(TABLES["experiences"])
    found = table.to_pylist()[0]
    assert (found["token_ids"], found["reward"], found["metrics"]) == ([1, 2], 1.0, [("accuracy", 1.0)])
    assert found["seed"] is None and found["turn"] is None


def test_a_column_that_there_is_not_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="groups has no column"):
        rows_to_table("groups", [{"group": "a"}])


def test_no_rows_are_a_table_too() -> None:
    assert rows_to_table("steps", []).schema.equals(TABLES["steps"])


def test_nulls_of_a_column_are_filled_and_the_type_stays() -> None:
    column = pa.chunked_array([[True, None], [False]])
    assert values_of(column) == [True, None, False]
    assert values_of(filled(column, True)) == [True, True, False]
    assert filled(column, True).type == pa.bool_()


def test_every_table_says_what_it_is_and_by_which_schema() -> None:
    for name, schema in TABLES.items():
        assert schema.metadata == {b"trinity_table": name.encode(), b"trinity_schema_version": b"6"}


def test_a_message_with_tool_calls_comes_back_as_it_was() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2, "é"]}}}
    chat = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "1", "name": "add"},
    ]
    table = rows_to_table("experiences", [{"messages": [message_row(message) for message in chat]}])
    assert [message_from_row(row) for row in table["messages"][0].as_py()] == chat
    assert [is_whole_in_row(message) for message in chat] == [True] * 3
    parts = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    assert not is_whole_in_row(parts) and message_row(parts)["content"] == json.dumps(parts["content"])
    assert not is_whole_in_row(chat[0] | {"reasoning": "none"})


def test_only_equal_content_has_the_same_id() -> None:
    assert content_id("a", ["b"]) == content_id("a", ["b"])
    contents = [("a", "b"), ("ab",), ("a", ["b"]), (["a", "b"],), ("a", "b", None), ("b", "a"), (1,), ("1",)]
    assert len({content_id(*parts) for parts in contents}) == len(contents)
    assert all(len(content_id(*parts)) == 32 for parts in contents)


def test_ids_sort_as_rows_were_made() -> None:
    made = [
        experience_id(group_id("e", "rl", step, position), rollout, turn)
        for step in (1, 2, 10, 100)
        for position in (0, 9, 10)
        for rollout in (0, 2, 11)
        for turn in (0, 1)
    ]
    assert sorted(made) == made
    assert made[0] == "e/rl/0000001/00000/000/00"
