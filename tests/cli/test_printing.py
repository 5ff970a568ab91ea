"""What commands print beside answers to SQL."""

from __future__ import annotations

import json

import pytest

from trinity_data.cli.printing import print_histogram, print_json
from trinity_data.launch.preview import Bin


def test_json_is_one_line_without_control_characters_and_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"task": "red\x1b[31m\x9b", "lower": float("nan")})
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert "\x1b" not in printed and "\x9b" not in printed
    assert json.loads(printed) == {"task": "red\x1b[31m\x9b", "lower": None}


def test_the_longest_bar_of_a_histogram_is_that_of_the_largest_number(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bins = [Bin(0.0, 0.5, 8, 1), Bin(0.5, 1.0, 4, 2)]
    print_histogram("pass rate", bins, numbers=("tasks", "chosen"), bar=lambda each: each.chosen)
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["pass", "rate", "from", "to", "tasks", "chosen"]
    assert [line.split() for line in lines] == [
        ["0", "0.5", "8", "1", "█" * 15],
        ["0.5", "1", "4", "2", "█" * 30],
    ]
