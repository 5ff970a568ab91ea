from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from trinity_data.dataset.text_files import CsvRows
from trinity_data.errors import ConfigError


def columns_of(file: Path, text: str) -> dict[str, list[object]]:
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    rows = CsvRows([file])
    return {name: [rows[number][name] for number in range(len(rows))] for name in rows.columns}


def test_a_column_is_numbers_only_where_they_read_back_as_written(tmp_path: Path) -> None:
    text = (
        "n,x,zip,price,long,word,flag\n"
        "1,0.1,007,1.50,123456789012345678901234567890,NA,true\n"
        "-2,2.5,12,2,1,None,\n"
    )
    assert columns_of(tmp_path / "a.csv", text) == {
        "n": [1, -2],
        "x": [0.1, 2.5],
        "zip": ["007", "12"],
        "price": ["1.50", "2"],
        "long": ["123456789012345678901234567890", "1"],
        "word": ["NA", "None"],
        "flag": ["true", None],
    }


def test_an_empty_cell_is_null_and_a_quoted_one_is_empty_text(tmp_path: Path) -> None:
    assert columns_of(tmp_path / "a.csv.gz", 'n,t\n1,\n,""\n3,"a\nb, c"\n') == {
        "n": [1, None, 3],
        "t": [None, "", "a\nb, c"],
    }


def test_a_row_of_more_cells_is_reported_with_its_number(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.csv: cannot be read as CSV: .*Expected 2 columns, got 3"):
        columns_of(tmp_path / "a.csv", "a,b\n1,2\n1,2,3\n")
