from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from trinity_data.dataset.row import UnreadableRow
from trinity_data.dataset.text_files import JsonRows
from trinity_data.errors import ConfigError


def rows_of(file: Path, text: bytes) -> list[dict[str, object]]:
    file.write_bytes(text)
    rows = JsonRows([file])
    return [rows[number] for number in range(len(rows))]


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": 1}\n{"a": 2}\n',
        b'{"a": 1}\n{"a": 2}',
        b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": 2}\r\n\n',
        b'[{"a": 1}, {"a": 2}]',
        b'\xef\xbb\xbf\n[\n {"a": 1},\n {"a": 2}\n]\n',
    ],
)
def test_lines_and_arrays_are_read(tmp_path: Path, text: bytes) -> None:
    assert rows_of(tmp_path / "x.jsonl", text) == [{"a": 1}, {"a": 2}]


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    assert rows_of(tmp_path / "x.jsonl", b"") == []


def test_numbers_types_and_missing_keys_are_as_written(tmp_path: Path) -> None:
    text = b'{"a": 123456789012345678901234567890}\n{"a": "x"}\n{"b": [0.1, null]}\n'
    rows = rows_of(tmp_path / "x.jsonl", text)
    assert rows == [{"a": 123456789012345678901234567890}, {"a": "x"}, {"b": [0.1, None]}]


def test_several_files_are_one_behind_the_other(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 0}\n{"n": 1}\n')
    (tmp_path / "b.jsonl").write_text("")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"n": 2}\n'))
    rows = JsonRows([tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl.gz")])
    assert [rows[number]["n"] for number in (2, 0, 1)] == [2, 0, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a": 1}\n\n{"a": \n', r"x\.jsonl:3: not JSON: Expecting value"),
        (b'{"a": 1}\n{"a": 2, "a": 3}\n', r"x\.jsonl:2: not JSON: the key 'a' is given twice"),
        (b'{"a": 1}\n[1]\n', r"x\.jsonl:2: found list; a row is an object of columns"),
        (b'{"a": "\xff"}\n', r"x\.jsonl:1: not UTF-8"),
        (b'[{"a": 1}, 2]', r"x\.jsonl, item 1: found int"),
        (b'{\n "a": 1\n}\n', r"x\.jsonl:2: not JSON: .*an object a line, or one array of objects"),
        (b"[" * 100_000 + b"\n", r"x\.jsonl: not JSON"),
    ],
)
def test_what_is_no_row_is_named_with_its_file_and_line(tmp_path: Path, text: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rows_of(tmp_path / "x.jsonl", text)


def test_a_file_that_is_not_packed_says_so(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl.gz").write_bytes(b'{"a": 1}\n')
    with pytest.raises(ConfigError, match=r"x\.jsonl\.gz: cannot be unpacked"):
        JsonRows([tmp_path / "x.jsonl.gz"])


def test_half_of_a_character_is_not_utf_8(tmp_path: Path) -> None:
    assert rows_of(tmp_path / "x.jsonl", b'{"a": "\\ud83d\\ude00"}\n') == [{"a": "\U0001f600"}]
    with pytest.raises(ConfigError, match=r"x\.jsonl:2: not UTF-8: surrogates not allowed"):
        rows_of(tmp_path / "x.jsonl", b'{"a": 1}\n{"a": "\\uD83D"}\n')


def test_bad_rows_that_are_skipped_keep_their_number_and_their_reason(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"a": 1}\n{"a": \n{"a": "\xff"}\n[1]\n{"a": 5}\n')
    rows = JsonRows([tmp_path / "x.jsonl"], skip_bad_rows=True)
    read = [rows[number] for number in range(len(rows))]
    assert read == [{"a": 1}, {}, {}, {}, {"a": 5}]
    bad = [row.reason for row in read if isinstance(row, UnreadableRow)]
    assert [reason.split("x.jsonl:")[1][:12] for reason in bad] == [
        "2: not JSON:",
        "3: not UTF-8",
        "4: found lis",
    ]
