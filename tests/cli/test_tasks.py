"""`trinity-data tasks`: six problems through two operators, counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import trinity_data
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


PROBE = "[{name: prompt_length_filter, args: {max_length: 10}}, {name: pass_rate_probe, args: {rollouts: 2}}]"


def test_an_operator_that_asks_the_model_gets_engines_and_what_they_said_is_on_record(
    command: list[str], tmp_path: Path
) -> None:
    output = tmp_path / "chosen"
    probing = [
        *command[:-1],
        f"data_processor.task_pipeline.operators={PROBE}",
        f"data_processor.task_pipeline.output.path={output}",
    ]
    first = CliRunner().invoke(cli, [*probing, "--json"], catch_exceptions=False)
    record = tmp_path / "checkpoints" / "tests" / "fake-tasks"
    assert "starts its engines (fake)" in first.stderr and str(record) in first.stderr
    assert "4 tasks, 2 rollouts each: 8 requests" in first.stderr
    found = json.loads(first.stdout)
    assert found["operators"][2]["operator"] == "pass_rate_probe" and found["operators"][2]["rows_in"] == 5
    assert sum(each["tasks"] for each in found["histograms"]["pass_rate"]) == 5
    probes = trinity_data.open(record).sql("select rollouts, model_version from task_probes").arrow()
    assert probes.to_pylist() == [{"rollouts": 2, "model_version": 0}] * 4
    # written without another rollout, and then taken as it is
    second = CliRunner().invoke(cli, [*probing, "--json", "--write"], catch_exceptions=False)
    assert "0 tasks, 2 rollouts each" in second.stderr and "4 tasks were on record" in second.stderr
    assert json.loads(second.stdout)["kept"] == found["kept"]
    lines = [json.loads(line) for line in (output / "tasks.jsonl").read_text().splitlines()]
    assert len(lines) == found["kept"] and "pass_rate" in lines[0]["scores"]
    third = CliRunner().invoke(cli, [*probing, "--json", "--write"], catch_exceptions=False)
    assert third.stdout == "" and "the output is there already" in third.stderr


def test_a_part_of_the_tasks_is_not_written(command: list[str], tmp_path: Path) -> None:
    output = f"data_processor.task_pipeline.output.path={tmp_path / 'chosen'}"
    result = CliRunner().invoke(cli, [*command, output, "--write", "--limit", "3"])
    assert "found limit 3 with write" in str(result.exception)
    result = CliRunner().invoke(cli, [*command, "--write"])
    assert "found no data_processor.task_pipeline.output" in str(result.exception)


def test_an_operator_that_asks_an_auxiliary_model_gets_its_engine(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "grader.json").write_text(json.dumps({"": ["7"]}))
    engine = f"model_path: 'synthetic://qwen2-1m', engine_type: fake, script: {tmp_path}/grader.json"
    judge = "[{name: judge_score, args: {model: grader, prompt: 'How hard is {question}'}}]"
    asking = [
        *command[:-1],
        f"explorer.auxiliary_models=[{{name: grader, {engine}}}]",
        f"data_processor.task_pipeline.operators={judge}",
    ]
    result = CliRunner().invoke(cli, [*asking, "--json"], catch_exceptions=False)
    (scored,) = (each for each in json.loads(result.stdout)["operators"] if each["operator"] == "judge_score")
    assert scored["rows_out"] == scored["rows_in"] > 0
    (bin_,) = json.loads(result.stdout)["histograms"]["judge_score"]
    assert bin_["tasks"] == scored["rows_in"]
