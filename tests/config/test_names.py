"""Names that registries above the configuration know, and the names that both must have."""

from __future__ import annotations

from pathlib import Path

from trinity_data.config import ALGORITHM_TYPES, load_pipeline_file
from trinity_data.config.algorithm import ADVANTAGE_FNS, ENTROPY_LOSS_FNS, KL_FNS, POLICY_LOSS_FNS
from trinity_data.config.names import unknown_workflows
from trinity_operators.advantages import ADVANTAGES
from trinity_trainer.algorithms.registry import ALGORITHMS

QWEN = Path(__file__).parents[2] / "pipelines" / "gsm8k_qwen.yaml"


def test_an_unknown_workflow_and_reward_function_are_named() -> None:
    (stage,) = load_pipeline_file(QWEN, ["buffer.default_reward_fn_type=math_rewrd"]).stages
    found = [finding.text for finding in unknown_workflows(stage, {"chat_workflow"}, {"math_reward"})]
    assert len(found) == 4
    assert "unknown workflow 'math_workflow'; known: chat_workflow" in found[0]
    assert (
        "unknown reward function 'math_rewrd'; known: math_reward (did you mean 'math_reward'?)" in found[1]
    )
    assert not list(unknown_workflows(stage, {"math_workflow"}, {"math_rewrd"}))


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
