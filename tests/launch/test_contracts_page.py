"""What docs/howto/contracts.md shows: contracts that can be checked, queries, and what a command prints."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from trinity_data.cli.main import cli
from trinity_data.config.contracts import DEFAULT_CONTRACTS, ContractConfig
from trinity_data.launch.check import load_checked
from trinity_data.schema import rows_to_table
from trinity_data.store.sql import open_sql
from trinity_data.store.store import Store
from trinity_data.store.types import Commit

FILE = Path(__file__).with_name("fake.yaml")
PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "contracts.md").read_text()
EXAMPLES, DEFAULT, QUERIES = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.S))
BROKEN, ROWS = re.findall(r"```sql\n(.*?)```", PAGE, re.S)


@pytest.fixture
def run(small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, named as on the page."""
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path / "checkpoints"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "checkpoints" / "gsm8k" / "run"
    shutil.copytree(small_run, folder)
    return folder


@pytest.mark.parametrize("given", [EXAMPLES, QUERIES], ids=["examples", "queries"])
def test_the_contracts_of_the_page_can_be_checked(
    given: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    load_checked(FILE, [f"contracts={json.dumps(given['contracts'])}"])


def test_the_default_contract_is_that_of_the_page() -> None:
    assert tuple(map(ContractConfig.model_validate, DEFAULT["contracts"])) == DEFAULT_CONTRACTS


def test_the_queries_of_the_page_give_what_was_broken_and_its_rows(run: Path) -> None:
    bad = "explorer/grpo/0000001/00000/001/00"
    rows = [
        {"contract": name, "stage": "grpo", "step": 1, "action": "warn", "kind": "range", "value": 1.0,
         "upper": 0.5, "held": name != "rewards", "row_ids": [bad], "dropped_ids": []}
        for name in ("rewards", "other")
    ]  # fmt: skip
    store = Store.create_or_open(run / "store")
    store.commit(Commit(tables={"contracts": rows_to_table("contracts", rows)}))
    store.close()
    with open_sql([run]) as session:
        (broken,), (row,) = (session.query(query).to_pylist() for query in (BROKEN, ROWS))
    assert (broken["contract"], broken["value"], broken["rows"], broken["dropped"]) == ("rewards", 1.0, 1, 0)
    assert row == {
        "experience_id": bad, "raw_reward": 1.0, "response_text": "answer 1", "state": "trained"
    }  # fmt: skip


def test_the_command_prints_what_the_page_shows(run: Path, tmp_path: Path) -> None:
    contract = {"name": "rewards", "check": "range", "column": "reward", "max": 0.5}
    (tmp_path / "contracts.yaml").write_text(json.dumps({"contracts": [contract]}))
    command, printed = re.findall(r"```console\n\$ trinity-data (.*?)\n(.*?)```", PAGE, re.S)[-1]
    result = CliRunner().invoke(cli, command.split())
    assert result.exit_code == 1
    assert [line.rstrip() for line in result.stdout.splitlines()] == printed.splitlines()
