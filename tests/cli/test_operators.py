"""`trinity-data operators …`"""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.operators.chat_server import chat_server
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


@pytest.mark.parametrize("template", ["function", "filter", "mapper"])
def test_a_new_operator_works_and_passes_its_own_test(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    said = invoke("new", f"my_{template}", f"--{template}")
    name = said.rpartition(" ")[2].strip()
    assert ", none failed" in invoke("test", name, "--no-ray")
    tests = runpy.run_path(str(tmp_path / f"test_my_{template}.py"))
    ran = [test() for test_name, test in tests.items() if test_name.startswith("test_")]
    assert len(ran) == 2
    refused = CliRunner().invoke(cli, ["operators", "new", f"my_{template}"])
    assert refused.exit_code == 2 and "exists" in refused.output


def test_a_golden_sample_is_stored_and_then_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"reward": 1.0}\n{"reward": 0.5}\n')
    command = ["test", "reward_filter", "--rows", "rows.jsonl", "--golden", "golden.jsonl", "--no-ray"]
    assert "golden sample       passed" in invoke(*command, "--args", "threshold=0.75", "--renew")
    lines = (tmp_path / "golden.jsonl").read_text().splitlines()
    assert [json.loads(line)["kept"] for line in lines] == [True, False]
    changed = CliRunner().invoke(cli, ["operators", *command, "--args", "threshold=0.25"])
    assert changed.exit_code == 1
    assert "rows that differ: 1, as row-00001: dropped: reward below 0.75, then kept" in changed.output


def test_the_checks_ask_a_language_model_each_question_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with chat_server(lambda _, __: (200, "7")) as server:
        address = ["--args", "model=tiny", "--args", f"base_url={server.url}"]
        said = invoke("test", "judge_score", *address, "--no-ray")
    assert len(server.questions) == len(set(server.questions)) < 30
    assert f"{len(server.questions)} questions were asked" in said
    assert "to the model 'tiny', and each of them once" in said
    assert re.search(r"row order +skipped +it asks a model", said)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--args", "threshold"], "found 'threshold'; wanted key=value"),
        (["--args", "threshold=high", "--no-ray"], "threshold: found 'high'"),
        (["--renew"], "--renew needs the file of --golden"),
        (["--golden", "none.jsonl", "--no-ray"], "there is no file 'none.jsonl'; write it with --renew"),
        (["--rows", "none.jsonl"], "there is no file 'none.jsonl'"),
    ],
)
def test_a_mistake_in_a_test_of_an_operator_is_one_message(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["operators", "test", "reward_filter", *arguments])
    assert result.exit_code in (1, 2)
    assert message in " ".join(f"{result.output} {result.exception}".split())
