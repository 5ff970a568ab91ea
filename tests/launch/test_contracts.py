"""Contracts that cannot be checked are problems of the file; those that can are checked in a stored run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trinity_data.cli.main import cli
from trinity_data.errors import ConfigError
from trinity_data.launch.check import load_checked

FILE = Path(__file__).with_name("fake.yaml")


def problems(**keys: Any) -> list[str]:
    contracts = json.dumps([{"name": "c", **keys}])
    try:
        load_checked(FILE, [f"contracts={contracts}"])
    except ConfigError as error:
        return [line for line in str(error).splitlines() if "contracts.0" in line]
    return []


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))


@pytest.mark.parametrize(
    "keys",
    [
        {"check": "range", "column": "scores['quality'] + shaped_reward", "max": 1},
        {"check": "kept_share", "operator": "difficulty_filter", "min": 0.1},
        {"check": "kept_share", "operator": "reward_std_filter", "min": 0.1},
        {"check": "sql", "sql": "select experience_id from step_rows", "action": "quarantine"},
        {"check": "sql", "sql": "select count(*) from step_rows where reward > 5", "action": "stop"},
    ],
)
def test_a_contract_that_can_be_checked_is_taken(keys: dict[str, Any]) -> None:
    assert problems(**keys) == []


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"check": "range", "column": "rewrd", "max": 1}, "unknown column 'rewrd'"),
        ({"check": "not_null", "column": "reward +"}, "is no SQL expression"),
        ({"check": "kept_share", "operator": "reward_filter", "min": 1}, "unknown operator 'reward_filter'"),
        ({"check": "sql", "sql": "select reward from step_rowz"}, "step_rowz"),
        ({"check": "sql", "sql": "select 1, 2"}, "allowed are one number, or rows with experience_id"),
        ({"check": "sql", "sql": "select random()"}, "calls random(), which answers differently"),
        (
            {"check": "sql", "sql": "select 1", "action": "quarantine"},
            "gives a number, and quarantine drops rows",
        ),
    ],
)
def test_a_contract_that_cannot_be_checked_is_refused_with_its_key(
    keys: dict[str, Any], message: str
) -> None:
    (line,) = problems(**keys)
    assert message in line


def check(run: Path, tmp_path: Path, *contracts: dict[str, Any]) -> Any:
    file = tmp_path / "contracts.yaml"
    file.write_text(f"contracts: {json.dumps(contracts)}")
    return CliRunner().invoke(cli, ["contracts", str(run), str(file)])


def test_contracts_of_a_file_are_checked_in_a_stored_run(small_run: Path, tmp_path: Path) -> None:
    rewards = {"name": "rewards", "check": "range", "column": "reward", "max": 0.5}
    nulls = {"name": "numbers", "check": "not_null", "column": "logprobs"}
    again = {"name": "again", "check": "recomputation"}
    assert check(small_run, tmp_path, nulls).exit_code == 0
    result = check(small_run, tmp_path, rewards, nulls, again)
    assert result.exit_code == 1, result.output
    # step 1 alone was explored to its end: rewards 0, 1, 1, 1
    assert [line.split() for line in result.stdout.splitlines()[1:4]] == [
        ["grpo", "rewards", "range", "warn", "1", "1"],
        ["grpo", "numbers", "not_null", "warn", "1", "0"],
        ["grpo", "again", "recomputation", "warn", "0", "0"],
    ]
    assert (
        "grpo, step 1: contract 'rewards' is broken: 3 of 4 rows have reward outside at most 0.5"
        in result.stdout
    )
    assert "contract 'again' was not checked in 1 steps: `trinity-data verify-rewards`" in result.stdout


def test_without_a_file_the_runs_own_contracts_are_checked(small_run: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["contracts", str(small_run)])
    assert (result.exit_code, result.stdout.splitlines()[1].split()) == (
        0, ["grpo", "reward_drift", "drift", "warn", "1", "0"]
    )  # fmt: skip
    without = tmp_path / "without"
    shutil.copytree(small_run, without)
    config = (without / "config.json").read_text()
    (without / "config.json").write_text(
        config.replace('"default_contracts":true', '"default_contracts":false')
    )
    result = CliRunner().invoke(cli, ["contracts", str(without)])
    assert (result.exit_code, result.stdout) == (
        0, f"{without}: there are no contracts; name a file that has some\n"
    )  # fmt: skip


def test_a_file_without_contracts_is_refused(small_run: Path, tmp_path: Path) -> None:
    result = check(small_run, tmp_path)
    assert "found no contracts; write some under `contracts:`" in str(result.exception)
