"""Truncated importance weights between sampled and recomputed log-probs."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.algorithms.losses import loss_of
from trinity_trainer.algorithms.aggregation import Denominators
from trinity_trainer.algorithms.importance import truncated_importance_weights
from trinity_trainer.algorithms.policy_losses import PolicyInputs

SAMPLED_BT = torch.full((1, 4), -3.0)
RECOMPUTED_BT = SAMPLED_BT + torch.tensor([[0.5, 1.5, 8.0, float("inf")]]).log()
MASK_BT = torch.tensor([[True, True, True, False]])


def test_each_token_is_weighed_by_its_ratio_up_to_the_cap() -> None:
    weights_BT = truncated_importance_weights(SAMPLED_BT, RECOMPUTED_BT, MASK_BT)
    assert weights_BT[0].tolist() == pytest.approx([0.5, 1.5, 2.0, 1.0])


def test_a_row_can_be_weighed_as_a_whole() -> None:
    weights_BT = truncated_importance_weights(SAMPLED_BT, RECOMPUTED_BT, MASK_BT, cap=10.0, level="sequence")
    assert weights_BT[0].tolist() == pytest.approx([6.0] * 4)


def test_a_huge_ratio_does_not_overflow() -> None:
    weights_BT = truncated_importance_weights(torch.full((1, 1), -1e4), torch.zeros(1, 1), MASK_BT[:, :1])
    assert weights_BT.item() == pytest.approx(2.0)


def test_the_weights_scale_the_policy_loss_and_not_the_kl() -> None:
    logprobs_BT = torch.full((1, 4), -1.0)
    weights_BT = torch.tensor([[0.5, 2.0, 1.0, 7.0]])
    ref_BT = torch.full((1, 4), -2.0)
    ones_BT = torch.ones(1, 4)
    inputs = PolicyInputs(logprobs_BT, logprobs_BT, ones_BT, MASK_BT, ref_BT, weights_BT=weights_BT)
    output = loss_of("grpo")(inputs, Denominators.of(MASK_BT.sum(dim=1).tolist(), max_response_tokens=8))
    assert output.metrics["policy_loss"].item() == pytest.approx(-3.5 / 3)
    assert output.metrics["kl"].item() == pytest.approx(0.5)
    assert output.loss.item() == pytest.approx(-3.5 / 3 + 0.001 * 0.5)
