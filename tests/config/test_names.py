"""Names that a registry above the configuration knows, and the names that both must have."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_data.config import ALGORITHM_TYPES, load_pipeline_file
from trinity_data.config.algorithm import ADVANTAGE_FNS, ENTROPY_LOSS_FNS, KL_FNS, POLICY_LOSS_FNS
from trinity_data.config.names import check_operators, check_workflows
from trinity_data.errors import ConfigError
from trinity_operators.advantages import ADVANTAGES
from trinity_trainer.algorithms.registry import ALGORITHMS

QWEN = Path(__file__).parents[2] / "pipelines" / "gsm8k_qwen.yaml"
OPERATORS = {
    "text_length_filter",
    "difficulty_filter",
    "quality_score",
    "reward_shaping_mapper",
    "reward_std_filter",
}


def test_operators_that_are_known_or_come_from_outside_pass() -> None:
    check_operators(load_pipeline_file(QWEN), OPERATORS)
    outside = (
        "data_processor.experience_pipeline.operators=[{name: './mine.py:Bonus'}, {name: 'my.module:Bonus'}]"
    )
    check_operators(load_pipeline_file(QWEN, [outside]), OPERATORS)


def test_an_unknown_operator_is_named_with_its_line() -> None:
    with pytest.raises(ConfigError) as caught:
        check_operators(load_pipeline_file(QWEN), OPERATORS - {"difficulty_filter"} | {"difficulty_filtre"})
    line = str(caught.value)
    assert line.startswith(
        f"{QWEN}:57: data_processor.task_pipeline.operators.1.name: unknown operator 'difficulty_filter'"
    )
    assert line.endswith("(did you mean 'difficulty_filtre'?)")


def test_an_unknown_workflow_and_reward_function_are_named() -> None:
    run = load_pipeline_file(QWEN, ["buffer.default_reward_fn_type=math_rewrd"])
    with pytest.raises(ConfigError) as caught:
        check_workflows(run, {"chat_workflow"}, {"math_reward"})
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert "unknown workflow 'math_workflow'; known: chat_workflow" in str(caught.value)
    assert "unknown reward function 'math_rewrd'; known: math_reward (did you mean 'math_reward'?)" in str(
        caught.value
    )
    check_workflows(run, {"math_workflow"}, {"math_rewrd"})


def test_algorithms_are_those_of_the_trainer() -> None:
    assert set(ALGORITHM_TYPES) == set(ALGORITHMS)
    for name, method in ALGORITHM_TYPES.items():
        assert method.needs_group == (
            ALGORITHMS[name].min_repeat_times > 1 and not ALGORITHMS[name].pairwise
        ), name


def test_functions_are_those_of_the_registries() -> None:
    assert set(ADVANTAGE_FNS) == set(ADVANTAGES)
    for algorithm in ALGORITHMS.values():
        assert algorithm.policy_loss_fn in POLICY_LOSS_FNS
        assert algorithm.kl_loss_fn in KL_FNS
        assert algorithm.entropy_loss_fn in ENTROPY_LOSS_FNS
