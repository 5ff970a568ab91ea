"""Each policy loss against numbers worked out by hand, and its gradient where the sources give one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trinity_trainer.algorithms.policy_losses import (
    PolicyInputs,
    PolicyLossFunction,
    cispo_loss,
    gspo_loss,
    importance_sampling_loss,
    opmd_loss,
    ppo_loss,
    rec_loss,
    sapo_loss,
    sft_is_loss,
    sft_loss,
    sft_phi_loss,
    sppo_loss,
    topr_loss,
)


def rows(
    ratios: list[list[float]],
    advantages: list[float],
    *,
    logprob: float = -1.0,
    mask: list[list[bool]] | None = None,
) -> PolicyInputs:
    """Tokens of one log-prob with the ratios and the advantage of a row asked for."""
    ratios_BT = torch.tensor(ratios, dtype=torch.float64)
    logprobs_BT = torch.full_like(ratios_BT, logprob).requires_grad_()
    return PolicyInputs(
        logprobs_BT=logprobs_BT,
        old_logprobs_BT=logprob - ratios_BT.log(),
        advantages_BT=torch.tensor(advantages, dtype=torch.float64).unsqueeze(1).expand_as(ratios_BT),
        mask_BT=torch.ones_like(ratios_BT, dtype=torch.bool) if mask is None else torch.tensor(mask),
    )


def values(loss: PolicyLossFunction, inputs: PolicyInputs, **arguments: object) -> list[list[float]]:
    losses: list[list[float]] = loss(inputs, **arguments).per_token_BT.tolist()
    return losses


def gradients(loss: PolicyLossFunction, inputs: PolicyInputs, **arguments: object) -> Tensor:
    """Of the sum of the token losses by each log-prob."""
    total = loss(inputs, **arguments).per_token_BT.sum()
    (gradient_BT,) = torch.autograd.grad(total, inputs.logprobs_BT)
    return gradient_BT


def test_ppo_clips_only_where_the_step_would_go_too_far() -> None:
    inputs = rows([[0.5, 1.0, 1.5]] * 2, [2.0, -2.0])
    loss = ppo_loss(inputs)
    assert loss.per_token_BT[0].tolist() == pytest.approx([-1.0, -2.0, -2.4])
    assert loss.per_token_BT[1].tolist() == pytest.approx([1.6, 2.0, 3.0])
    assert loss.clipped_BT.tolist() == [[False, False, True], [True, False, False]]
    assert loss.ratio_BT[0].tolist() == pytest.approx([0.5, 1.0, 1.5])


def test_a_clipped_token_has_no_gradient_and_the_others_that_of_their_ratio() -> None:
    gradient_BT = gradients(ppo_loss, rows([[0.5, 1.0, 1.5]] * 2, [2.0, -2.0]))
    assert gradient_BT[0].tolist() == pytest.approx([-1.0, -2.0, 0.0])
    assert gradient_BT[1].tolist() == pytest.approx([0.0, 2.0, 3.0])


def test_ppo_clips_higher_than_lower_where_it_is_configured_so() -> None:
    inputs = rows([[0.75, 1.27, 1.5]], [1.0])
    assert values(ppo_loss, inputs, clip_range_high=0.28)[0] == pytest.approx([-0.75, -1.27, -1.28])
    inputs = rows([[0.75, 0.5]], [-1.0])
    assert values(ppo_loss, inputs, clip_range_low=0.3)[0] == pytest.approx([0.75, 0.7])


def test_the_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely() -> None:
    inputs = rows([[10.0]], [-2.0])
    loss = ppo_loss(inputs)
    assert loss.per_token_BT.tolist() == [[pytest.approx(6.0)]]
    assert loss.clipped_BT.tolist() == [[True]]
    assert gradients(ppo_loss, inputs).tolist() == [[0.0]]
    assert values(ppo_loss, inputs, clip_ratio_c=20.0) == [[pytest.approx(20.0)]]


def test_ppo_survives_a_ratio_that_overflows() -> None:
    inputs = rows([[1.0]], [-1.0], logprob=0.0)
    far = PolicyInputs(inputs.logprobs_BT, torch.full((1, 1), -1e4), inputs.advantages_BT, inputs.mask_BT)
    assert values(ppo_loss, far) == [[pytest.approx(3.0)]]


def test_sequence_masking_leaves_out_bad_responses_that_drifted() -> None:
    drifted, near = [math.exp(-0.2)] * 2, [math.exp(-0.05)] * 2
    inputs = rows([drifted, drifted, near], [-1.0, 1.0, -1.0])
    loss = ppo_loss(inputs, enable_sequence_masking=True)
    assert loss.per_token_BT[0].tolist() == [0.0, 0.0]
    assert loss.per_token_BT[1].tolist() == pytest.approx([-math.exp(-0.2)] * 2)
    assert loss.per_token_BT[2].tolist() == pytest.approx([math.exp(-0.05)] * 2)


def test_sequence_drift_is_the_mean_over_trained_tokens() -> None:
    inputs = rows([[math.exp(-0.2), math.exp(5.0)]], [-1.0], mask=[[True, False]])
    assert values(ppo_loss, inputs, enable_sequence_masking=True)[0][0] == 0.0


def test_policy_gradient_fallback_ignores_the_ratio() -> None:
    inputs = rows([[0.1, 5.0]], [2.0])
    assert values(ppo_loss, inputs, fallback_to_policy_gradient=True)[0] == pytest.approx([-2.0, -2.0])
    gradient_BT = gradients(ppo_loss, inputs, fallback_to_policy_gradient=True)
    assert gradient_BT[0].tolist() == pytest.approx([-2.0, -2.0])


def test_opmd_divides_the_policy_gradient() -> None:
    inputs = rows([[1.0, 2.0]], [3.0], logprob=-0.5)
    assert values(opmd_loss, inputs)[0] == pytest.approx([0.75, 0.75])
    assert gradients(opmd_loss, inputs, tau=0.0)[0].tolist() == pytest.approx([-3.0, -3.0])


def test_topr_weighs_bad_responses_by_the_ratio_of_the_whole() -> None:
    inputs = rows([[0.5, 0.5], [0.5, 0.5], [2.0, 2.0]], [-1.0, 1.0, -1.0])
    gradient_BT = gradients(topr_loss, inputs)
    assert gradient_BT[0].tolist() == pytest.approx([0.25, 0.25])  # 0.5 × 0.5
    assert gradient_BT[1].tolist() == pytest.approx([-1.0, -1.0])
    assert gradient_BT[2].tolist() == pytest.approx([1.0, 1.0])  # 4, cut to 1
    assert topr_loss(inputs).clipped_BT.tolist() == [[False, False], [False, False], [True, True]]


def test_topr_can_take_the_ratio_of_each_token() -> None:
    inputs = rows([[0.5, 0.25]], [-1.0])
    gradient_BT = gradients(topr_loss, inputs, ratio_level="token")
    assert gradient_BT[0].tolist() == pytest.approx([0.5, 0.25])


def test_topr_ratio_counts_trained_tokens_only() -> None:
    inputs = rows([[0.5, 0.01]], [-1.0], mask=[[True, False]])
    assert gradients(topr_loss, inputs)[0, 0].item() == pytest.approx(0.5)


def test_topr_threshold_moves_what_counts_as_bad() -> None:
    inputs = rows([[0.5]], [0.4])
    assert gradients(topr_loss, inputs).item() == pytest.approx(-0.4)
    assert gradients(topr_loss, inputs, advantage_threshold=0.5).item() == pytest.approx(-0.2)


def test_cispo_keeps_the_gradient_of_tokens_whose_weight_it_clips() -> None:
    inputs = rows([[0.1, 1.0, 5.0]], [1.0])
    gradient_BT = gradients(cispo_loss, inputs)
    assert gradient_BT[0].tolist() == pytest.approx([-0.1, -1.0, -1.28])
    assert cispo_loss(inputs).clipped_BT.tolist() == [[False, False, True]]


def test_cispo_mask_drops_tokens_that_ran_ahead() -> None:
    inputs = rows([[5.0, 1.1], [0.1, 5.0]], [1.0, -1.0])
    gradient_BT = gradients(cispo_loss, inputs, enable_mask_clip=True, mask_clip_range_low=0.5)
    assert gradient_BT[0].tolist() == pytest.approx([0.0, -1.1])
    assert gradient_BT[1].tolist() == pytest.approx([0.0, 1.28])


def test_gspo_gives_every_token_the_mean_ratio_of_its_response() -> None:
    inputs = rows([[0.5, 2.0], [0.9999, 0.9999]], [2.0, 2.0])
    loss = gspo_loss(inputs)
    assert loss.ratio_BT[0].tolist() == pytest.approx([1.0, 1.0])  # √(0.5 · 2)
    assert loss.per_token_BT[0].tolist() == pytest.approx([-2.0, -2.0])
    gradient_BT = gradients(gspo_loss, inputs)
    assert gradient_BT[0].tolist() == pytest.approx([-2.0, -2.0])
    assert gradient_BT[1].tolist() == pytest.approx([-2.0 * 0.9999] * 2)


def test_gspo_clips_whole_responses() -> None:
    inputs = rows([[1.001, 1.001], [1.001, 1.001], [0.999, 0.999]], [1.0, -1.0, -1.0])
    assert gspo_loss(inputs).clipped_BT.tolist() == [[True, True], [False, False], [True, True]]
    assert gradients(gspo_loss, inputs)[0].tolist() == [0.0, 0.0]
    assert values(gspo_loss, inputs)[0] == pytest.approx([-1.0004, -1.0004])


def test_gspo_of_a_padded_row_ignores_the_padding() -> None:
    inputs = rows([[1.0, 50.0]], [1.0], mask=[[True, False]])
    assert gspo_loss(inputs).ratio_BT[0, 0].item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("advantage", "ratio", "weight"),
    [
        (1.0, 0.25, 0.218),
        (1.0, 1.0, 1.000),
        (1.0, 2.0, 1.573),
        (1.0, 4.0, 0.723),
        (1.0, 8.0, 0.029),
        (-1.0, 8.0, 0.021),
    ],
)
def test_sapo_has_the_papers_gradient(advantage: float, ratio: float, weight: float) -> None:
    gradient_BT = gradients(sapo_loss, rows([[ratio]], [advantage]))
    assert gradient_BT.item() == pytest.approx(-advantage * weight, abs=5e-4)


def test_sapo_at_the_sampling_policy_is_a_shifted_policy_gradient() -> None:
    inputs = rows([[1.0], [1.0]], [2.0, -2.0])
    # (4/τ)·σ(0) = 2/τ
    assert values(sapo_loss, inputs) == [[pytest.approx(-4.0)], [pytest.approx(4.0 / 1.05)]]
    assert gradients(sapo_loss, inputs).flatten().tolist() == pytest.approx([-2.0, 2.0])


def test_sppo_trains_only_near_the_sampling_policy() -> None:
    inputs = rows([[1.2, 1.31, 0.78, 0.76]], [2.0])
    expected = [-2.0 * math.log(1.2), 0.0, -2.0 * math.log(0.78), 0.0]
    assert values(sppo_loss, inputs)[0] == pytest.approx(expected)
    assert sppo_loss(inputs).clipped_BT.tolist() == [[False, True, False, True]]
    assert gradients(sppo_loss, inputs)[0].tolist() == pytest.approx([-2.0, 0.0, -2.0, 0.0])


def test_importance_sampling_is_unclipped() -> None:
    inputs = rows([[0.1, 7.0]], [2.0])
    assert values(importance_sampling_loss, inputs)[0] == pytest.approx([-0.2, -14.0])
    assert gradients(importance_sampling_loss, inputs)[0].tolist() == pytest.approx([-0.2, -14.0])


def test_sft_is_the_negative_log_likelihood() -> None:
    assert values(sft_loss, rows([[1.0]], [5.0], logprob=-0.7)) == [[pytest.approx(0.7)]]


def test_sft_weights_are_constants() -> None:
    inputs = rows([[1.0]], [1.0], logprob=math.log(0.2))
    assert values(sft_is_loss, inputs) == [[pytest.approx(-0.2 * math.log(0.2))]]
    assert gradients(sft_is_loss, inputs).item() == pytest.approx(-0.2)
    assert values(sft_phi_loss, inputs) == [[pytest.approx(-0.16 * math.log(0.2))]]
    assert gradients(sft_phi_loss, inputs).item() == pytest.approx(-0.16)


def test_sft_phi_leaves_alone_what_is_likelier_than_the_cutoff() -> None:
    inputs = rows([[1.0]], [1.0], logprob=math.log(0.9))
    assert gradients(sft_phi_loss, inputs, cutoff_prob=0.8).item() == 0.0
    assert sft_phi_loss(inputs, cutoff_prob=0.8).clipped_BT.item()
    assert gradients(sft_phi_loss, inputs, cutoff_prob=0.95).item() == pytest.approx(-0.09)


REC_RATIOS = [0.3, 0.7, 1.0, 1.5, 4.0]


@pytest.mark.parametrize(
    ("clip_mode", "good", "bad"),
    [
        ("none", [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]),
        ("one-side", [1, 1, 1, 0, 0], [0, 0, 1, 1, 1]),
        ("two-side", [0, 0, 1, 0, 0], [0, 0, 1, 0, 0]),
        ("ring", [1, 0, 1, 0, 0], [0, 0, 1, 0, 1]),
    ],
)
def test_rec_trains_the_tokens_of_its_range(clip_mode: str, good: list[int], bad: list[int]) -> None:
    gradient_BT = gradients(rec_loss, rows([REC_RATIOS] * 2, [1.0, -1.0]), clip_mode=clip_mode)
    assert (gradient_BT[0] != 0).int().tolist() == good
    assert (gradient_BT[1] != 0).int().tolist() == bad


def test_rec_can_bound_whole_responses() -> None:
    inputs = rows([[4.0, 0.25], [1.5, 1.5]], [1.0, 1.0])
    gradient_BT = gradients(rec_loss, inputs, clip_mode="gspo-one-side")
    assert gradient_BT.tolist() == [[-1.0, -1.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        ("none", [1.0, 1.0]),
        ("importance_sampling", [4.0, 0.25]),
        ("gspo_importance_sampling", [1.0, 1.0]),
        ("advantage", [math.exp(2.0 / 4.0)] * 2),
    ],
)
def test_rec_weights_any_range(weight: str, expected: list[float]) -> None:
    gradient_BT = gradients(rec_loss, rows([[4.0, 0.25]], [2.0]), weight=weight, temp=4.0)
    assert gradient_BT[0].tolist() == pytest.approx([-2.0 * w for w in expected])


def test_rec_regularisers_pull_on_every_token() -> None:
    inputs = rows([[4.0, 1.0]], [0.0], logprob=-0.5)
    k2 = values(rec_loss, inputs, regularizer="k2", regularizer_coef=0.1)[0]
    assert k2 == pytest.approx([0.1 * math.log(4.0) ** 2, 0.0])
    forward = values(rec_loss, inputs, regularizer="forward-kl", regularizer_coef=0.1)[0]
    assert forward == pytest.approx([0.05, 0.05])


def test_at_the_sampling_policy_all_ratio_losses_share_the_policy_gradient() -> None:
    inputs = rows([[1.0, 1.0]] * 2, [1.5, -0.5])
    for loss in (
        ppo_loss,
        topr_loss,
        cispo_loss,
        gspo_loss,
        sapo_loss,
        sppo_loss,
        rec_loss,
        importance_sampling_loss,
    ):
        torch.testing.assert_close(gradients(loss, inputs), -inputs.advantages_BT, msg=loss.__name__)


def test_supervised_rows_have_a_ratio_of_one() -> None:
    logprobs_BT = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    mask_BT = torch.ones(1, 2, dtype=torch.bool)
    inputs = PolicyInputs(logprobs_BT, logprobs_BT.detach(), torch.ones_like(logprobs_BT), mask_BT)
    assert sft_loss(inputs).ratio_BT.tolist() == [[1.0, 1.0]]
