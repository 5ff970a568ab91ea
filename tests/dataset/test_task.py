from __future__ import annotations

from typing import Any

import pytest

from trinity_data.config import FormatConfig, TasksetConfig
from trinity_data.dataset.task import (
    MAX_PROMPT_BYTES,
    MAX_ROW_BYTES,
    TaskRows,
    build_task_rows,
    check_taskset,
    tasks_from_table,
    with_own_columns,
)
from trinity_data.errors import ConfigError
from trinity_data.schema import TABLES, message_from_row


def config_of(name: str = "sums", workflow: str | None = "simple_workflow", **form: Any) -> TasksetConfig:
    return TasksetConfig(
        name=name, path="x", split="train", format=FormatConfig(**form), default_workflow_type=workflow
    )


def build(rows: list[dict[str, Any]], *, name: str = "sums", **form: Any) -> TaskRows:
    return build_task_rows(
        config_of(name, **form),
        rows,
        stage="rl",
        source="data",
        source_rows=[10 + i for i in range(len(rows))],
        first_position=64,
    )


def rows_of(rows: list[dict[str, Any]], **form: Any) -> list[dict[str, Any]]:
    """The rows as they are stored, with their messages as they are read again."""
    tasks: list[dict[str, Any]] = build(rows, **form).tasks.to_pylist()
    return [
        task | {"messages": [message_from_row(each) for each in task["messages"] or []]} for task in tasks
    ]


def reasons(rows: list[dict[str, Any]], **form: Any) -> list[str]:
    return list(build(rows, **form).reasons)


def test_a_row_becomes_a_task_that_knows_where_it_came_from() -> None:
    (row,) = rows_of([{"q": "2+3?", "a": "#### 5"}], prompt_key="q", response_key="a")
    assert row["messages"] == [{"role": "user", "content": "2+3?"}]
    assert (row["prompt"], row["answer"]) == ("2+3?", "#### 5")
    assert (row["source"], row["source_row"], row["position"], row["split"]) == ("data", 10, 64, "train")
    assert (row["workflow"], row["reward_fn"], row["kept"]) == ("simple_workflow", "", True)


def test_a_rows_own_system_prompt_workflow_and_reward_take_precedence_over_the_sets() -> None:
    rows = [
        {"prompt": "a", "response": "1", "sys": "Be brief.", "w": "math_workflow", "r": "format_reward"},
        {"prompt": "b", "response": "2", "sys": None, "w": None, "r": None},
    ]
    keys = {"system_prompt_key": "sys", "system_prompt": "Add.", "workflow_key": "w", "reward_fn_key": "r"}
    first, second = rows_of(rows, **keys)
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
    (row,) = rows_of([{"chat": said}], prompt_type="messages", messages_key="chat")
    assert (row["messages"], row["prompt"], row["answer"]) == (said, "2+3?", "")


def test_a_prompt_is_made_from_several_columns() -> None:
    rows = [{"Body": "Ann has 3 nuts.", "Question": "How many are 2 {more}?", "response": 5}]
    (row,) = rows_of(rows, prompt_key="{Body}\n{Question} {{x}}")
    assert row["prompt"] == "Ann has 3 nuts.\nHow many are 2 {more}? {x}"
    assert row["messages"] == [{"role": "user", "content": row["prompt"]}]
    assert row["answer"] == "5"
    assert reasons([{"Body": None, "Question": "b", "response": 1}], prompt_key="{Body} {Question}") == [
        "column 'Body' of '{Body} {Question}' holds null"
    ]


@pytest.mark.parametrize(
    ("cell", "answer"),
    [
        (0, "0"),
        (0.0, "0.0"),
        (False, "false"),
        (0.1 + 0.2, "0.30000000000000004"),
        (11.0, "11.0"),
        (1e16, "10000000000000000"),
        (1e-7, "0.0000001"),
        (123456789012345678901234567890, "123456789012345678901234567890"),
        (["a", 1], '["a", 1]'),
        ("  x ", "  x "),
    ],
)
def test_an_answer_is_what_is_written(cell: object, answer: str) -> None:
    rows = build([{"prompt": "a", "response": cell}])
    assert (rows.tasks["answer"].to_pylist(), rows.reasons) == ([answer], [""])


@pytest.mark.parametrize("cell", [None, float("nan"), "", "  "])
def test_a_row_without_an_answer_is_not_tried(cell: object) -> None:
    assert reasons([{"prompt": "a", "response": cell}, {"prompt": "b", "response": "1"}]) == [
        "column 'response' holds no answer",
        "",
    ]


def test_a_set_without_answers_is_for_workflows_that_want_none() -> None:
    assert reasons([{"prompt": "a"}]) == [""]
    check_taskset(config_of(), ["prompt"], "data")
    with pytest.raises(
        ConfigError, match=r"has no column 'response'; it has prompt; set format\.response_key"
    ):
        check_taskset(config_of(workflow=None), ["prompt"], "data")


def test_rows_that_ask_the_same_are_two_tasks_with_ids_that_stay() -> None:
    rows = [
        {"prompt": "a", "response": "1"},
        {"prompt": "b", "response": "1"},
        {"prompt": "a", "response": "1"},
    ]
    ids = [row["task_id"] for row in rows_of(rows)]
    assert len(set(ids)) == 3
    assert [row["task_id"] for row in rows_of(rows)] == ids
    assert rows_of(rows, name="other")[0]["task_id"] != ids[0]


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (None, "column 'prompt' holds no prompt: null"),
        (" \n", "the prompt is empty"),
        ({"role": "user"}, "column 'prompt' holds an object, not a list of messages"),
        ([], "'prompt' holds no messages"),
        ([{"from": "human", "value": "hi"}], "prompt[0] has no role; it has from, value"),
        ([{"role": "user"}], "prompt[0] has no content"),
        ([{"role": "user", "content": None}], "prompt[0] has no content"),
        (["hi"], "prompt[0] is text, not a message with role and content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "prompt[0] has a part of type 'image_url'; only text parts can be read",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"id": "1"}]}],
            "prompt[0] has tool_calls, which no prompt can hold yet",
        ),
        (
            [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
            "the last message of 'prompt' is the assistant's, so that the prompt holds an answer",
        ),
    ],
)
def test_what_is_no_prompt_is_not_tried_and_says_why(prompt: object, reason: str) -> None:
    assert reasons([{"prompt": prompt, "response": "4"}]) == [reason]


def test_a_list_of_messages_is_recognised_in_the_prompts_column() -> None:
    said = [
        {"role": "user", "content": [{"type": "text", "text": "Look up "}, {"type": "text", "text": "2+2."}]},
        {"role": "tool", "content": "4", "tool_call_id": "c1", "name": None},
    ]
    (row,) = rows_of([{"prompt": said, "response": "4"}], system_prompt="Be brief.")
    assert row["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look up 2+2."},
        {"role": "tool", "content": "4"},
    ]


def test_a_row_of_many_bytes_is_left_out_and_not_kept() -> None:
    rows = build([{"prompt": "a" * MAX_ROW_BYTES, "response": "1"}, {"prompt": "b", "response": "1"}])
    assert (
        rows.reasons[0] == f"the row is of {MAX_ROW_BYTES + 31:,} bytes; at most {MAX_ROW_BYTES:,} are read"
    )
    assert rows.reasons[1] == ""
    assert rows.tasks.nbytes < 10_000


def test_a_prompt_of_many_bytes_is_not_tried_and_other_columns_may_be_long() -> None:
    said = [{"role": "user", "content": "ä" * (MAX_PROMPT_BYTES // 2 + 1)}]
    rows = build(
        [{"prompt": said, "response": "1"}, {"prompt": "a", "response": "1", "tests": "b" * MAX_PROMPT_BYTES}]
    )
    assert rows.reasons == [
        f"the prompt is of {MAX_PROMPT_BYTES + 2:,} bytes; at most {MAX_PROMPT_BYTES:,} are tried",
        "",
    ]
    assert rows.tasks["messages"].to_pylist()[0] == []


def test_operators_see_the_sets_own_columns_and_the_store_does_not() -> None:
    rows = build([{"prompt": "a", "response": "1", "level": 3}])
    assert rows.tasks.schema.names == TABLES["tasks"].names
    assert rows.for_operators()["level"].to_pylist() == [3]
    assert with_own_columns(rows.tasks)["level"].to_pylist() == [3]


def test_a_column_of_mixed_types_is_text_for_operators_and_itself_for_the_task() -> None:
    rows = build(
        [
            {"prompt": "a", "response": "1", "level": 3},
            {"prompt": "b", "response": "1", "level": "hard"},
            {"prompt": "c", "response": "1", "level": {"of": [1]}},
        ]
    )
    assert rows.for_operators()["level"].to_pylist() == ["3", "hard", '{"of": [1]}']
    assert [task.columns["level"] for task in tasks_from_table(rows.tasks)] == [3, "hard", {"of": [1]}]


def test_stored_rows_are_tasks_again() -> None:
    (task,) = tasks_from_table(build([{"prompt": "a", "response": "1"}]).tasks)
    assert task.messages == ({"role": "user", "content": "a"},)
    assert (task.prompt, task.answer, task.taskset, task.workflow) == ("a", "1", "sums", "simple_workflow")


def test_a_task_has_every_column_of_its_row() -> None:
    rows = [{"prompt": "a", "response": "1", "level": 3, "tests": ["x == 1"], "columns": "own"}]
    (task,) = tasks_from_table(build(rows).tasks)
    assert task.columns == rows[0]


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({}, r"taskset 'sums': data has no column 'prompt'; it has promt, answer \(did you mean 'promt'\?\)"),
        (
            {"prompt_key": "promt", "response_key": "anwser"},
            r"no column 'anwser'; .*\(did you mean 'answer'\?\)",
        ),
        ({"prompt_key": "{promt} {anwser}"}, r"no column 'anwser'.*set format\.prompt_key"),
        (
            {"prompt_key": "promt", "system_prompt_key": "sys"},
            r"no column 'sys'.*set format\.system_prompt_key",
        ),
        ({"prompt_key": "promt", "workflow_key": "flow"}, r"no column 'flow'"),
        ({"prompt_key": "promt", "reward_fn_key": "fn"}, r"no column 'fn'"),
        ({"prompt_type": "messages", "messages_key": "chat"}, r"no column 'chat'.*set format\.messages_key"),
        (
            {"prompt_key": "{promt"},
            r"found '\{promt', a text of several columns with a brace that has no partner",
        ),
    ],
)
def test_a_column_that_is_named_and_not_there_is_refused(form: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_taskset(config_of(**form), ["promt", "answer"], "data")


def test_answer_workflow_and_reward_are_found_inside_columns() -> None:
    row = {
        "prompt": [{"role": "user", "content": "2+3?"}],
        "reward_model": {"ground_truth": 5},
        "extra": {"kind": "math", "rewards": ["format_reward"]},
    }
    keys = {
        "response_key": "#### {reward_model.ground_truth}",
        "workflow_key": "{extra.kind}_workflow",
        "reward_fn_key": "extra.rewards[0]",
    }
    (task,) = rows_of([row], **keys)
    assert [task[name] for name in ("prompt", "answer", "workflow", "reward_fn")] == [
        "2+3?",
        "#### 5",
        "math_workflow",
        "format_reward",
    ]
    assert reasons([row | {"reward_model": {}}], response_key="reward_model.ground_truth") == [
        "column 'reward_model.ground_truth' holds no answer"
    ]


def test_a_path_into_a_column_that_is_not_there_names_the_column() -> None:
    config = config_of(response_key="reward.ground_truth", reward_fn_key="{extra.kind}")
    with pytest.raises(ConfigError) as error:
        check_taskset(config, ["prompt", "rewards"], "data")
    said = str(error.value)
    assert (
        "has no column 'reward'; it has prompt, rewards (did you mean 'rewards'?); set format.response_key"
        in said
    )
    assert "has no column 'extra'; it has prompt, rewards; set format.reward_fn_key" in said
