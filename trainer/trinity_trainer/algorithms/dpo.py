"""Direct preference optimization: one loss for each pair of responses to the same prompt.

Rows come in twos, chosen then rejected, and a pair is never split over micro-batches.
P pairs, B = 2P rows, T response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from trinity_trainer.algorithms.aggregation import masked
from trinity_trainer.algorithms.arguments import Positive, Share
from trinity_trainer.algorithms.policy_losses import PolicyInputs


@dataclass(frozen=True)
class DpoLoss:
    """Per pair; a pair of padding rows is 0 throughout."""

    per_pair_P: Tensor
    accuracies_P: Tensor
    """1 where the policy, against the reference, prefers the chosen response."""
    margins_P: Tensor
    """Implicit reward of the chosen response less that of the rejected one."""
    chosen_rewards_P: Tensor
    rejected_rewards_P: Tensor


def dpo_loss(inputs: PolicyInputs, *, beta: Positive = 0.1, label_smoothing: Share = 0.0) -> DpoLoss:
    """−(1−ls) log σ(βΔ) − ls log σ(−βΔ), Δ = (log π − log π_ref) of the chosen less
    of the rejected response.
    """
    assert inputs.ref_logprobs_BT is not None, "DPO needs the reference's log-probs"
    assert len(inputs.mask_BT) % 2 == 0, "DPO needs whole pairs"
    rewards_B = beta * masked(inputs.logprobs_BT - inputs.ref_logprobs_BT, inputs.mask_BT).sum(dim=1)
    real_P = inputs.mask_BT.bool().any(dim=1).view(-1, 2).all(dim=1)
    chosen_P, rejected_P = rewards_B[0::2], rewards_B[1::2]
    margins_P = chosen_P - rejected_P
    loss_P = -(1.0 - label_smoothing) * logsigmoid(margins_P) - label_smoothing * logsigmoid(-margins_P)
    zero = torch.zeros((), dtype=loss_P.dtype, device=loss_P.device)
    return DpoLoss(
        per_pair_P=torch.where(real_P, loss_P, zero),
        accuracies_P=(real_P & (margins_P > 0)).to(loss_P.dtype),
        margins_P=torch.where(real_P, margins_P, zero).detach(),
        chosen_rewards_P=torch.where(real_P, chosen_P, zero).detach(),
        rejected_rewards_P=torch.where(real_P, rejected_P, zero).detach(),
    )
