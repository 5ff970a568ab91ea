"""What is wrong with a section `algorithm` is told before anything starts, with its place."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

from trinity_data.config import AlgorithmConfig
from trinity_data.config.algorithm_registry import ALGORITHMS
from trinity_trainer.algorithms.check import check_algorithm


def diagnostics(algorithm_type: str = "grpo", *, explores: bool = True, **keys: Any) -> dict[str, str]:
    """Texts by key path."""
    config = AlgorithmConfig(algorithm_type=algorithm_type, repeat_times=2, **keys)
    return {
        ".".join(map(str, found.path)): found.message for found in check_algorithm(config, explores=explores)
    }


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_the_defaults_of_every_algorithm_are_sound(name: str) -> None:
    assert diagnostics(name) == {}


@pytest.mark.parametrize(
    ("algorithm_type", "keys", "path", "text"),
    [
        (
            "grpo",
            {"policy_loss_fn_args": {"clip_rang": 0.2}},
            "policy_loss_fn_args.clip_rang",
            "unknown ppo argument 'clip_rang'; .*did you mean 'clip_range'",
        ),
        ("grpo", {"policy_loss_fn_args": {"clip_range": "a"}}, "policy_loss_fn_args.clip_range", "found 'a'"),
        (
            "dpo",
            {"policy_loss_fn_args": {"beta": -1}},
            "policy_loss_fn_args.beta",
            "found -1; .*greater than 0",
        ),
        (
            "grpo",
            {"kl_loss_fn_args": {"kl_coeff": 0.1}},
            "kl_loss_fn_args.kl_coeff",
            "did you mean 'kl_coef'",
        ),
        ("grpo", {"entropy_loss_fn_args": {"coef": 1}}, "entropy_loss_fn_args.coef", "known: entropy_coef"),
        ("grpo", {"policy_loss_fn": "dpo"}, "policy_loss_fn", "'dpo' takes pairs"),
        ("dpo", {"policy_loss_fn": "sft"}, "policy_loss_fn", "which only 'dpo' takes"),
        ("grpo", {"kl_loss_fn": "k1"}, "kl_loss_fn", "expected gradient is 0 .*allowed: k2"),
        (
            "dapo",
            {"kl_loss_fn_args": {"kl_coef": 0.1}},
            "kl_loss_fn_args",
            "no effect with 'dapo', whose kl_loss_fn is 'none'",
        ),
        (
            "sft",
            {"entropy_loss_fn_args": {"entropy_coef": 0.1}},
            "entropy_loss_fn_args",
            "no effect with 'sft', whose entropy_loss_fn is 'none'",
        ),
        (
            "dpo",
            {"kl_loss_fn": "none", "loss_agg_mode": "token-mean"},
            "loss_agg_mode",
            "no effect with 'dpo', a mean over pairs",
        ),
        ("sft", {"bypass_old_logprobs": False}, "bypass_old_logprobs", "no effect .*takes no ratio"),
        (
            "grpo",
            {"rollout_correction": {"rollout_is": "token"}},
            "rollout_correction.rollout_is",
            "write bypass_old_logprobs: false",
        ),
        (
            "grpo",
            {"rollout_correction": {"rollout_is_threshold": 3.0}},
            "rollout_correction.rollout_is_threshold",
            "no effect without rollout_is",
        ),
    ],
)
def test_what_does_not_fit_is_reported_at_its_place(
    algorithm_type: str, keys: dict[str, Any], path: str, text: str
) -> None:
    found = diagnostics(algorithm_type, **keys)
    assert list(found) == [f"algorithm.{path}"]
    assert re.search(text, found[f"algorithm.{path}"]), found


def test_all_problems_are_reported_at_once() -> None:
    found = diagnostics(
        policy_loss_fn_args={"a": 1, "clip_range": "x"}, kl_loss_fn_args={"b": 2}, kl_loss_fn="k1"
    )
    assert len(found) == 4


def test_k1_may_pull_on_rows_that_the_policy_did_not_sample() -> None:
    assert diagnostics("dpo", explores=False, kl_loss_fn="k1") == {}


def test_checking_needs_torch_only_for_the_arguments_of_a_policy_loss() -> None:
    program = (
        "import sys; from trinity_data.config import AlgorithmConfig as A;"
        "from trinity_trainer.algorithms.check import check_algorithm as c;"
        "c(A(algorithm_type='grpo', repeat_times=8, kl_loss_fn_args={'kl_coef': 1}), explores=True);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
