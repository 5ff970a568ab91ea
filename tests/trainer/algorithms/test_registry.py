"""Algorithms compose, and a pipeline file changes single parts of them or is told why not."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any, get_args

import pytest
import torch

from tests.trainer.algorithms.losses import loss_of
from trinity_data.config.algorithm_registry import ALGORITHMS, AdvantageFn, Algorithm, KlFn, PolicyLossFn
from trinity_data.errors import ConfigError
from trinity_operators.registry import ADVANTAGES
from trinity_trainer.algorithms.aggregation import Denominators
from trinity_trainer.algorithms.loss import KL_FUNCTIONS
from trinity_trainer.algorithms.policy_losses import POLICY_LOSSES, PolicyInputs

MASK_BT = torch.tensor([[True, True, True], [True, False, False]])
DENOMINATORS = Denominators.of(MASK_BT.sum(dim=1).tolist(), max_response_tokens=8)


def inputs(*, entropy: bool = False) -> PolicyInputs:
    """Ratios 1.5 in the first row and 1 in the second; Δ to the reference is −1 everywhere."""
    old_BT = torch.full((2, 3), -1.0, dtype=torch.float64)
    logprobs_BT = old_BT + torch.tensor([[1.5], [1.0]], dtype=torch.float64).log()
    return PolicyInputs(
        logprobs_BT=logprobs_BT.requires_grad_(),
        old_logprobs_BT=old_BT,
        advantages_BT=torch.tensor([[2.0], [-1.0]], dtype=torch.float64).expand(2, 3),
        mask_BT=MASK_BT,
        ref_logprobs_BT=logprobs_BT.detach() + 1.0,
        entropy_BT=torch.full_like(old_BT, 0.25) if entropy else None,
    )


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_builds_and_trains(name: str) -> None:
    batch = inputs()
    output = loss_of(name)(batch, DENOMINATORS)
    (gradient_BT,) = torch.autograd.grad(output.loss, batch.logprobs_BT)
    assert torch.isfinite(gradient_BT).all()
    assert gradient_BT[MASK_BT].any()
    assert not gradient_BT[~MASK_BT].any()


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=lambda a: a.name)
def test_every_part_an_algorithm_names_is_there(algorithm: Algorithm) -> None:
    assert algorithm.advantage_fn is None or algorithm.advantage_fn in ADVANTAGES
    assert algorithm.policy_loss_fn in POLICY_LOSSES or algorithm.pairwise
    assert loss_of(algorithm.name).needs_reference == algorithm.needs_reference


def test_grpo_is_the_sum_of_its_terms() -> None:
    loss_function = loss_of("grpo", entropy_loss_fn_args={"entropy_coef": 0.01})
    output = loss_function(inputs(entropy=True), DENOMINATORS)
    # three tokens clipped at 1.2, one at ratio 1
    policy = (3 * -2.0 * 1.2 + 1.0) / 4
    assert output.metrics["policy_loss"].item() == pytest.approx(policy)
    assert output.loss.item() == pytest.approx(policy + 0.001 * 0.5 - 0.01 * 0.25)
    assert output.metrics["policy_kl"].item() == pytest.approx(-3 * math.log(1.5) / 4)
    assert output.metrics["clipped_share"].item() == pytest.approx(0.75)
    assert output.importance_weight_mean_B.tolist() == pytest.approx([1.5, 1.0])
    assert output.clipped_share_B.tolist() == pytest.approx([1.0, 0.0])
    shares_B = [3 * (-2.4 + 0.0005 - 0.0025) / 4, (1.0 + 0.0005 - 0.0025) / 4]
    assert output.loss_share_B.tolist() == pytest.approx(shares_B)


def test_one_given_argument_leaves_the_other_defaults() -> None:
    loss_function = loss_of("grpo", policy_loss_fn_args={"clip_range_high": 0.28})
    assert loss_function.policy_loss_fn_args["clip_range_high"] == 0.28
    assert loss_function.policy_loss_fn_args["clip_range"] == 0.2
    assert loss_function.policy_loss_fn_args["clip_ratio_c"] == 3.0


def test_dapo_clips_higher_unless_it_is_configured_otherwise() -> None:
    assert loss_of("dapo").policy_loss_fn_args["clip_range_high"] == 0.28
    changed = loss_of("dapo", policy_loss_fn_args={"clip_range_high": 0.3})
    assert changed.policy_loss_fn_args["clip_range_high"] == 0.3
    assert not loss_of("dapo").needs_reference


def test_an_algorithms_own_arguments_stay_behind_when_its_loss_is_replaced() -> None:
    assert loss_of("dapo", policy_loss_fn="sapo").policy_loss_fn_args == {"tau_pos": 1.0, "tau_neg": 1.05}


def test_gspo_averages_responses() -> None:
    assert loss_of("gspo").loss_agg_mode == "seq-mean-token-mean"
    assert loss_of("gspo", loss_agg_mode="token-mean").loss_agg_mode == "token-mean"


def test_a_reference_is_needed_for_kl_and_pairs_only() -> None:
    assert loss_of("grpo").needs_reference
    assert loss_of("grpo").kl_coef == 0.001
    assert not loss_of("grpo", kl_loss_fn="none").needs_reference
    assert not loss_of("grpo", kl_loss_fn_args={"kl_coef": 0}).needs_reference
    assert loss_of("dpo", kl_loss_fn="none").needs_reference
    assert not loss_of("sft").needs_reference


def test_entropy_is_needed_only_with_a_coefficient() -> None:
    assert not loss_of("grpo").needs_entropy
    assert loss_of("grpo", entropy_loss_fn_args={"entropy_coef": 0.01}).needs_entropy
    off = loss_of("grpo", entropy_loss_fn="none", entropy_loss_fn_args={"entropy_coef": 0.01})
    assert not off.needs_entropy


def test_entropy_without_a_coefficient_is_measured_and_changes_nothing() -> None:
    with_entropy = loss_of("grpo")(inputs(entropy=True), DENOMINATORS)
    assert with_entropy.metrics["entropy"].item() == pytest.approx(0.25)
    assert with_entropy.loss.item() == loss_of("grpo")(inputs(), DENOMINATORS).loss.item()


@pytest.mark.parametrize(
    ("algorithm_type", "changes", "message"),
    [
        ("grop", {}, "algorithm.algorithm_type: unknown algorithm 'grop'; .*did you mean 'grpo'"),
        ("grpo", {"policy_loss_fn": "gpso"}, r"algorithm.policy_loss_fn: .*'gpso'.*did you mean 'gspo'"),
        (
            "grpo",
            {"policy_loss_fn_args": {"clip_rnge": 0.1}},
            r"algorithm.policy_loss_fn_args: unknown ppo argument 'clip_rnge'; .*did you mean 'clip_range'",
        ),
        (
            "grpo",
            {"policy_loss_fn_args": {"clip_range": "wide"}},
            "policy_loss_fn_args.clip_range: found 'wide'",
        ),
        (
            "grpo",
            {"policy_loss_fn_args": {"clip_range": -0.1}},
            "clip_range: found -0.1; .*greater than or equal to 0",
        ),
        ("grpo", {"policy_loss_fn_args": {"clip_ratio_c": 1.0}}, "clip_ratio_c: found 1.0; .*greater than 1"),
        ("grpo", {"policy_loss_fn_args": {"enable_sequence_masking": 1}}, "found 1; .*valid boolean"),
        ("rec", {"policy_loss_fn_args": {"clip_mode": "both"}}, "found 'both'; .*'one-side'"),
        ("sft", {"policy_loss_fn_args": {"tau": 1.0}}, "sft takes no arguments, found 'tau'"),
        ("grpo", {"kl_loss_fn": "k4"}, "algorithm.kl_loss_fn: unknown name 'k4'; known: .*k2"),
        (
            "grpo",
            {"kl_loss_fn_args": {"coef": 0.1}},
            "algorithm.kl_loss_fn_args: unknown .*did you mean 'kl_coef'",
        ),
        ("grpo", {"kl_loss_fn_args": {"kl_coef": -1}}, "kl_loss_fn_args.kl_coef: found -1"),
        ("grpo", {"entropy_loss_fn": "mix"}, "algorithm.entropy_loss_fn: unknown name 'mix'"),
        ("grpo", {"entropy_loss_fn_args": {"entropy_coeff": 0.1}}, "did you mean 'entropy_coef'"),
        ("grpo", {"loss_agg_mode": "token_mean"}, "algorithm.loss_agg_mode: .*did you mean 'token-mean'"),
        ("dpo", {"policy_loss_fn": "ppo"}, "'dpo' trains on pairs"),
        ("grpo", {"policy_loss_fn": "dpo"}, "'grpo' trains on single rows"),
    ],
)
def test_what_cannot_be_built_is_refused_by_its_key(
    algorithm_type: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        loss_of(algorithm_type, **changes)


def test_every_name_of_a_pipeline_file_has_a_function() -> None:
    assert set(get_args(PolicyLossFn)) == {*POLICY_LOSSES, "dpo"}
    assert set(get_args(AdvantageFn)) == set(ADVANTAGES)
    assert set(get_args(KlFn)) == set(KL_FUNCTIONS)
    assert all(name == algorithm.name for name, algorithm in ALGORITHMS.items())


def test_methods_that_compare_rollouts_want_two_of_them() -> None:
    wanted = {name: algorithm.min_repeat_times for name, algorithm in ALGORITHMS.items()}
    assert {name for name, times in wanted.items() if times == 1} == {
        "sft", "reinforce", "reinforceplusplus", "topr", "raft",
    }  # fmt: skip
    assert all(times <= ALGORITHMS[name].repeat_times for name, times in wanted.items())


def test_the_names_can_be_read_without_torch() -> None:
    code = "import sys, trinity_data.config.algorithm_registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
