from __future__ import annotations

from typing import Any

import pytest

from trinity_data.dataset.cells import cell, check_key, columns_of
from trinity_data.dataset.row import UnusableRow
from trinity_data.errors import ConfigError

ROW = {
    "q": "2+3?",
    "reward_model": {"ground_truth": 5, "style": "rule"},
    "turns": [{"content": "a"}, {"content": "b"}],
    "info": '{"tests": ["x", 1.50]}',
    "a.b": "dotted",
    "a": {"b": "inner"},
    "none": None,
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("q", "2+3?"),
        ("reward_model.ground_truth", 5),
        ("turns[0].content", "a"),
        ("turns[-1].content", "b"),
        ("info.tests[1]", 1.5),
        ("a.b", "dotted"),
        ("{q} = {reward_model.ground_truth}", "2+3? = 5"),
        ("{{{info.tests[0]}}}", "{x}"),
        ("turns[2].content", None),
        ("turns[-3]", None),
        ("turns.content", None),
        ("q.text", None),
        ("reward_model[0]", None),
        ("none.a", None),
        ("nothing", None),
    ],
)
def test_a_key_names_a_column_a_path_or_a_text_of_them(key: str, value: Any) -> None:
    assert cell(key, ROW) == value


def test_a_column_of_just_the_name_takes_precedence_over_a_path_and_a_template() -> None:
    row = {"{q}": 1, "x[0]": 2, "x": [3]}
    assert [cell(key, row) for key in ("{q}", "x[0]", "{x[0]}")] == [1, 2, "2"]


def test_a_template_of_what_is_neither_text_nor_a_number_is_refused_for_its_row() -> None:
    with pytest.raises(UnusableRow, match=r"column 'turns\[0\]' of '\{turns\[0\]\}' holds an object"):
        cell("{turns[0]}", ROW)
    with pytest.raises(UnusableRow, match=r"column 'none' of .* holds null"):
        cell("{q} {none}", ROW)


@pytest.mark.parametrize(
    ("key", "columns"),
    [
        ("q", ["q"]),
        ("reward_model.ground_truth", ["reward_model"]),
        ("a.b", ["a.b"]),
        ("{q} {turns[0].content} {q} {{x}}", ["q", "turns"]),
    ],
)
def test_the_columns_behind_a_key_are_known(key: str, columns: list[str]) -> None:
    assert columns_of(key, list(ROW)) == columns


@pytest.mark.parametrize("key", ["{q", "{q}}", "{{q}}", "{q} {"])
def test_a_template_without_a_column_or_with_a_brace_alone_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="a brace that has no partner or without a column"):
        check_key(key, list(ROW))
