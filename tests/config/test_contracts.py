"""Contracts of a pipeline file that cannot be meant are refused with the key and what is allowed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.small_pipelines import EXPLORING
from trinity_data.config import load_pipeline_file
from trinity_data.errors import ConfigError


def load(tmp_path: Path, *contracts: dict[str, Any], more: str = "") -> Any:
    file = tmp_path / "pipeline.yaml"
    file.write_text(f"{EXPLORING}{more}\ncontracts: {json.dumps(contracts)}\n")
    return load_pipeline_file(file)


def test_contracts_of_a_file_are_those_of_its_stages(tmp_path: Path) -> None:
    config = load(tmp_path, {"name": "r", "check": "range", "column": "reward", "max": 1, "action": "stop"})
    (contract,) = config.stages[0].contracts
    assert (contract.name, contract.bounds, contract.action) == ("r", (None, 1.0), "stop")


@pytest.mark.parametrize(
    ("contract", "message"),
    [
        ({"check": "rang", "column": "reward", "max": 1}, "did you mean 'range'?"),
        ({"check": "range", "column": "reward"}, "found check 'range' without min or max; write min or max"),
        ({"check": "range", "max": 1}, "found check 'range' without column; write column"),
        ({"check": "drift", "column": "reward"}, "without max"),
        (
            {"check": "not_null", "column": "logprobs", "max": 1},
            "found max with check 'not_null'; allowed with it: ",
        ),
        (
            {"check": "drift", "column": "reward", "max": 1, "measure": "psi", "standard_errors": 2},
            "found standard_errors with measure 'psi'; standard errors are of means",
        ),
        ({"check": "range", "column": "reward", "min": 2, "max": 1}, "found min 2 above max 1"),
        ({"check": "sql", "sql": "select 1", "action": "drop"}, "allowed: warn, quarantine, stop"),
        ({"check": "not_null", "column": "reward", "drops": "groups"}, "only quarantine drops"),
        ({"check": "contamination"}, "without the task operator contamination_filter, which measures it"),
    ],
)
def test_a_contract_that_cannot_be_meant_is_refused(
    tmp_path: Path, contract: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, {"name": "c", **contract})
    assert message in str(error.value) and "contracts.0" in str(error.value)


def test_two_contracts_of_one_name_are_refused(tmp_path: Path) -> None:
    one = {"name": "c", "check": "not_null", "column": "reward"}
    with pytest.raises(ConfigError, match="names of contracts must be unique"):
        load(tmp_path, one, one)


def test_a_contract_of_its_name_takes_the_place_of_the_default_one(tmp_path: Path) -> None:
    (stage,) = load(tmp_path).stages
    (default,) = stage.all_contracts
    assert (default.name, default.column, default.action) == ("reward_drift", "reward", "warn")
    other = {"name": "r", "check": "not_null", "column": "reward"}
    (stage,) = load(tmp_path, other).stages
    assert [each.name for each in stage.all_contracts] == ["r", "reward_drift"]
    own = {"name": "reward_drift", "check": "drift", "column": "reward", "max": 3}
    (stage,) = load(tmp_path, own).stages
    assert [each.bounds for each in stage.all_contracts] == [(None, 3.0)]
    (stage,) = load(tmp_path, other, more="\ndefault_contracts: false").stages
    assert [each.name for each in stage.all_contracts] == ["r"]


def test_contracts_of_a_stage_that_only_trains_are_refused(tmp_path: Path) -> None:
    one = {"name": "c", "check": "not_null", "column": "reward"}
    stage = {"stage_name": "sft", "mode": "train", "algorithm": {"algorithm_type": "sft"}, "contracts": [one]}
    stage |= {"buffer": {"trainer_input": {"experience_buffer": {"path": "synthetic://gsm8k"}}}}
    with pytest.raises(ConfigError, match=r"contracts: has no effect with mode 'train'"):
        load(tmp_path, one, more=f"stages: {json.dumps([stage, {'stage_name': 'rl'}])}")
