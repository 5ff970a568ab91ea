"""What a pipeline file may say about late groups and steps that are explored beside each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.small_pipelines import EXPLORING
from trinity_data.config import load_pipeline_file
from trinity_data.config.explorer import OverRolloutConfig
from trinity_data.errors import ConfigError

QWEN = Path(__file__).parents[2] / "pipelines" / "gsm8k_qwen.yaml"
LATE, TWO = "explorer.over_rollout={ratio: 0.25}", "explorer.max_inflight_batches=2"


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_pipeline_file(QWEN, list(overrides))
    return str(caught.value)


def test_a_share_of_the_groups_may_be_late() -> None:
    late = OverRolloutConfig(ratio=0.3)
    # 10 - ⌈10 × 0.7⌉, 1 - ⌈0.7⌉
    assert (late.most_late(10), late.most_late(1), late.most_late(0)) == (3, 0, 0)
    # 100 × (1 - 0.07) is 92.99999999999999 as a float
    assert OverRolloutConfig(ratio=0.07).most_late(100) == 7


@pytest.mark.parametrize(("key", "off"), [(LATE, "ratio: 0"), (TWO, "max_inflight_batches: 1")])
def test_tasks_are_not_chosen_by_rewards_that_are_not_there_yet(key: str, off: str) -> None:
    curriculum = "buffer.explorer_input.taskset.curriculum={sql: 'select task_id, 1 as weight from tasks'}"
    said = refusal(key, "synchronizer.sync_offset=1", curriculum)
    assert "a curriculum of task set" in said and said.endswith(f"write {off}")


def test_refills_are_of_one_step_at_a_time() -> None:
    said = refusal(TWO, "synchronizer.sync_offset=1", "explorer.refill_rounds=2")
    assert "explorer.max_inflight_batches: found 2 with refill_rounds 2" in said


def test_contracts_that_hold_rows_back_see_all_groups(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    contract = {"name": "low", "check": "range", "column": "reward", "max": 1, "action": "quarantine"}
    file.write_text(f"{EXPLORING}\ncontracts: {json.dumps([contract])}\n")
    with pytest.raises(ConfigError) as caught:
        load_pipeline_file(file, [LATE])
    said = "explorer.over_rollout.ratio: found 0.25 with the contract 'low', whose action 'quarantine'"
    assert said in str(caught.value)
    file.write_text(f"{EXPLORING}\ncontracts: {json.dumps([contract | {'action': 'warn'}])}\n")
    load_pipeline_file(file, [LATE])


def test_late_groups_are_a_version_older() -> None:
    strategy = "algorithm.sample_strategy_args={max_staleness: 1}"
    offset = ["synchronizer.sync_offset=1", "synchronizer.sync_interval=1"]
    load_pipeline_file(QWEN, [*offset, strategy, "algorithm.sample_strategy=staleness_control"])
    said = refusal(*offset, strategy, "algorithm.sample_strategy=staleness_control", LATE)
    assert "late rollouts are up to 2 versions old when their step is trained; allowed: ≥ 2" in said
