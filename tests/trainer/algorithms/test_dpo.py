"""DPO is a mean over pairs, whatever the micro-batches."""

from __future__ import annotations

import math

import pytest
import torch

from tests.trainer.algorithms.losses import loss_of
from trinity_trainer.algorithms.aggregation import Denominators
from trinity_trainer.algorithms.dpo import dpo_loss
from trinity_trainer.algorithms.policy_losses import PolicyInputs


def answers(logprobs_BT: torch.Tensor, mask_BT: torch.Tensor, ref_BT: torch.Tensor) -> PolicyInputs:
    """Rows that nobody sampled: ratio 1, advantage 1."""
    ones_BT = torch.ones_like(logprobs_BT)
    return PolicyInputs(logprobs_BT, logprobs_BT.detach(), ones_BT, mask_BT, ref_logprobs_BT=ref_BT)


def pairs(margins: list[float]) -> PolicyInputs:
    """Two tokens a row; the chosen rows carry the margin, the rejected rows a log-ratio of −1."""
    shifts = [shift for margin in margins for shift in (margin - 1.0, -1.0)]
    halves_BT = torch.tensor([[shift / 2] * 2 for shift in shifts], dtype=torch.float64)
    ref_BT = torch.full_like(halves_BT, -2.0)
    return answers((ref_BT + halves_BT).requires_grad_(), torch.ones_like(ref_BT, dtype=torch.bool), ref_BT)


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def test_the_loss_of_a_pair_is_the_log_sigmoid_of_its_margin() -> None:
    loss = dpo_loss(pairs([3.0, -2.0]), beta=0.5)
    assert loss.per_pair_P.tolist() == pytest.approx([softplus(-1.5), softplus(1.0)])
    assert loss.margins_P.tolist() == pytest.approx([1.5, -1.0])
    assert loss.accuracies_P.tolist() == [1.0, 0.0]
    assert loss.chosen_rewards_P.tolist() == pytest.approx([1.0, -1.5])
    assert loss.rejected_rewards_P.tolist() == pytest.approx([-0.5, -0.5])


def test_label_smoothing_mixes_in_the_other_preference() -> None:
    loss = dpo_loss(pairs([4.0]), beta=0.5, label_smoothing=0.25)
    assert loss.per_pair_P.item() == pytest.approx(0.75 * softplus(-2.0) + 0.25 * softplus(2.0))


def test_the_gradient_is_that_of_the_paper() -> None:
    inputs = pairs([3.0])
    (gradient_BT,) = torch.autograd.grad(dpo_loss(inputs, beta=0.5).per_pair_P.sum(), inputs.logprobs_BT)
    weight = 0.5 / (1.0 + math.exp(1.5))  # β σ(−βΔ)
    assert gradient_BT.flatten().tolist() == pytest.approx([-weight, -weight, weight, weight])


def test_four_pairs_are_averaged_and_not_summed_into_one() -> None:
    inputs = pairs([2.0, -1.0, 0.5, 3.0])
    output = loss_of("dpo", kl_loss_fn="none")(
        inputs, Denominators.of(inputs.mask_BT.sum(dim=1).tolist(), max_response_tokens=8)
    )
    mean = sum(softplus(-0.1 * margin) for margin in (2.0, -1.0, 0.5, 3.0)) / 4
    assert output.loss.item() == pytest.approx(mean)
    assert output.loss.item() != pytest.approx(softplus(-0.1 * 4.5), abs=1e-2)
    assert output.metrics["accuracy"].item() == pytest.approx(0.75)
    assert output.metrics["margin"].item() == pytest.approx(0.1 * 4.5 / 4)
    assert output.loss_share_B.sum().item() == pytest.approx(mean)


def test_pairs_of_padding_add_nothing() -> None:
    real = pairs([2.0, -1.0])
    fields = {
        name: torch.cat([value, torch.zeros_like(value)])
        for name, value in vars(real).items()
        if value is not None
    }
    padded = PolicyInputs(**fields)
    loss_function = loss_of("dpo")
    expected = loss_function(real, Denominators.of(real.mask_BT.sum(dim=1).tolist(), max_response_tokens=8))
    output = loss_function(padded, Denominators.of(padded.mask_BT.sum(dim=1).tolist(), max_response_tokens=8))
    assert output.loss.item() == pytest.approx(expected.loss.item())
    assert output.metrics["accuracy"].item() == pytest.approx(0.5)


def test_a_pair_with_an_empty_side_counts_in_no_mean() -> None:
    inputs = pairs([2.0, -1.0, 3.0])
    mask_BT = inputs.mask_BT.clone()
    mask_BT[5] = False
    halved = PolicyInputs(**vars(inputs) | {"mask_BT": mask_BT})
    denominators = Denominators.of(mask_BT.sum(dim=1).tolist(), max_response_tokens=8)
    output = loss_of("dpo", kl_loss_fn="none")(halved, denominators)
    assert output.loss.item() == pytest.approx((softplus(-0.2) + softplus(0.1)) / 2)
    assert output.metrics["accuracy"].item() == pytest.approx(0.5)


def test_tokens_that_are_not_trained_are_not_in_the_sums() -> None:
    inputs = pairs([3.0])
    wild_BT = torch.full((2, 1), float("nan"), dtype=torch.float64)
    assert inputs.ref_logprobs_BT is not None
    wide = answers(
        torch.cat([inputs.logprobs_BT, wild_BT], dim=1),
        torch.cat([inputs.mask_BT, torch.zeros(2, 1, dtype=torch.bool)], dim=1),
        torch.cat([inputs.ref_logprobs_BT, wild_BT], dim=1),
    )
    assert dpo_loss(wide).per_pair_P.tolist() == dpo_loss(inputs).per_pair_P.tolist()
