"""`trinity-data operators …`"""

from __future__ import annotations

import json

from typer.testing import CliRunner

from trinity_data.cli.main import cli


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["operators", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_list_of_operators_is_searched_by_a_word() -> None:
    rows = [json.loads(line) for line in invoke("list", "Near_Dup", "--format", "json").splitlines()]
    assert [(row["name"], row["kind"], row["source"]) for row in rows] == [
        ("near_duplicate_filter", "filter", "built in")
    ]


def test_an_operator_is_shown_with_types_defaults_bounds_and_needs() -> None:
    shown = invoke("show", "near_duplicate_filter")
    threshold = next(line for line in shown.splitlines() if line.startswith("threshold"))
    assert threshold.split() == ["threshold", "float", "0.8", "above", "0,", "at", "most", "1"]
    assert "reads: response_text\n" in shown and "keeps_state: True" in shown
