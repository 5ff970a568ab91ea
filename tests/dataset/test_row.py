from __future__ import annotations

import datetime
import pickle

import pytest

from trinity_data.dataset.row import Columns, columns_text


def test_a_row_comes_back_with_its_lists_its_null_and_its_long_number() -> None:
    row = {
        "tests": ["assert f(1)"],
        "level": None,
        "n": 123456789012345678901234567890,
        "ok": False,
        "x": 0.1,
    }
    assert dict(Columns(columns_text(row))) == row


def test_what_json_has_not_becomes_null_or_text() -> None:
    row = {
        "nan": float("nan"),
        "day": datetime.date(2026, 1, 2),
        "blob": b"abc",
        "deep": [{"inf": float("inf")}],
    }
    assert dict(Columns(columns_text(row))) == {
        "nan": None,
        "day": "2026-01-02",
        "blob": "<3 bytes>",
        "deep": [{"inf": None}],
    }


def test_a_reader_that_changes_a_value_changes_its_own_copy() -> None:
    columns = Columns('{"tests": ["a"]}')
    columns["tests"].append("b")
    assert columns["tests"] == ["a"]
    with pytest.raises(TypeError):
        columns["tests"] = []  # type: ignore[index]


def test_columns_travel_to_another_process() -> None:
    columns = Columns('{"level": 3}')
    assert pickle.loads(pickle.dumps(columns)) == columns == {"level": 3}
    assert {**columns} == {"level": 3}
