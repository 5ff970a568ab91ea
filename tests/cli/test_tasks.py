"""`trinity-data tasks`: six problems through two operators, counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from trinity_data.cli.main import cli

FILE = Path(__file__).parents[1] / "launch" / "fake.yaml"
QUESTIONS = ("1 + 1 = ?", "2 + 2 = ?", "What is three and three?", "4 + 4 = ?", "", "6 + 6 = ?")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two operators: at most ten characters; then no prompt twice. The fifth row cannot be tried."""
    lines = [{"question": question, "answer": "#### 1"} for question in (*QUESTIONS, QUESTIONS[0])]
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path / "checkpoints"))
    operators = "[{name: prompt_length_filter, args: {max_length: 10}}, {name: exact_duplicate_filter}]"
    return [
        "tasks",
        str(FILE),
        f"buffer.explorer_input.taskset.path={data}",
        f"data_processor.task_pipeline.operators={operators}",
    ]


def test_each_operator_says_what_it_dropped_and_why(command: list[str], tmp_path: Path) -> None:
    out = tmp_path / "tasks.parquet"
    result = CliRunner().invoke(cli, [*command, "--json", "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["rows"], found["kept"]) == (7, 4)
    rows = [(each["operator"], each["rows_in"], each["rows_out"]) for each in found["operators"]]
    assert rows[1:] == [("prompt_length_filter", 6, 5), ("exact_duplicate_filter", 5, 4)]
    assert rows[0][1:] == (7, 6)
    (example,) = found["operators"][1]["examples"]
    assert example["prompt"] == "What is three and three?"
    assert sum(found["operators"][1]["reasons"].values()) == 1
    table = pq.read_table(out)
    assert table.num_rows == 7 and sum(table["kept"].to_pylist()) == 4
    assert not (tmp_path / "checkpoints").exists()


def test_a_person_sees_the_table_and_a_limit_is_kept_to(command: list[str]) -> None:
    result = CliRunner().invoke(cli, [*command, "--limit", "3"], catch_exceptions=False)
    assert "of 3 rows are kept" in result.output
    assert "prompt_length_filter" in result.output


def test_an_unknown_stage_is_refused(command: list[str]) -> None:
    result = CliRunner().invoke(cli, [*command, "--stage", "grop"])
    assert result.exit_code != 0
    assert "did you mean 'grpo'" in str(result.exception)


def test_operators_get_what_is_the_stages(command: list[str]) -> None:
    """The tokenizer and the evaluation sets; and `top_k` is an operator behind those of the file."""
    pipeline = "data_processor.task_pipeline"
    more = [
        f"{pipeline}.operators=[{{name: token_length_filter}}, {{name: contamination_filter}}]",
        f"{pipeline}.priority_weights={{num_tokens: 1.0}}",
        f"{pipeline}.top_k=1",
        # the first question itself
        "buffer.explorer_input.eval_tasksets.0.split=train[:1]",
    ]
    result = CliRunner().invoke(cli, [*command, "--json", *more], catch_exceptions=False)
    rows = {each["operator"]: each["rows_out"] for each in json.loads(result.stdout)["operators"]}
    assert rows["token_length_filter"] == 6
    # of six two are the first question, and of the others one is the longest
    assert (rows["contamination_filter"], rows["priority_filter"]) == (4, 1)
