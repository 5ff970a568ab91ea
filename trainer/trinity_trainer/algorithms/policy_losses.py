"""Policy losses: for every response token the number whose mean is minimized.

Pure functions of log-probs; nothing is averaged here, `aggregation` does that. B rows, T response tokens;
r = π/π_old, A the advantage, sg the stop of a gradient. Keyword arguments are the `policy_loss_fn_args` of a
pipeline file, their defaults the documented ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trinity_trainer.algorithms.aggregation import masked, row_means
from trinity_trainer.algorithms.arguments import AboveOne, NonNegative, Positive, PositiveShare

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class PolicyInputs:
    """What losses are functions of. All [B, T]; values where the mask is false are ignored."""

    logprobs_BT: Tensor
    """Of the sampled tokens under the policy in training; carries the gradient."""
    old_logprobs_BT: Tensor
    """Of the same tokens under the policy that sampled them."""
    advantages_BT: Tensor
    mask_BT: Tensor
    """True where a token is trained."""
    ref_logprobs_BT: Tensor | None = None
    entropy_BT: Tensor | None = None
    weights_BT: Tensor | None = None
    """Multiplies the policy loss of each token, such as `truncated_importance_weights`."""


@dataclass(frozen=True)
class PolicyLoss:
    """A loss before aggregation, and what is worth recording about each token."""

    per_token_BT: Tensor
    ratio_BT: Tensor
    """r, without gradient."""
    clipped_BT: Tensor
    """True where a bound cut the token's gradient or its weight."""


PolicyLossFunction = Callable[..., PolicyLoss]


def ppo_loss(
    inputs: PolicyInputs,
    *,
    clip_range: NonNegative = 0.2,
    clip_range_low: NonNegative | None = None,
    clip_range_high: NonNegative | None = None,
    clip_ratio_c: AboveOne = 3.0,
    enable_sequence_masking: bool = False,
    delta_sequence_masking: float = 0.1,
    fallback_to_policy_gradient: bool = False,
) -> PolicyLoss:
    """max(−A r, −A clip(r, 1−ε_l, 1+ε_h)), and where A < 0 at most −A c (dual clip)."""
    low = clip_range if clip_range_low is None else clip_range_low
    high = clip_range if clip_range_high is None else clip_range_high
    log_ratio_BT = _log_ratio(inputs)
    advantages_BT = inputs.advantages_BT
    gradient_BT = _own_log_ratio(inputs) if fallback_to_policy_gradient else log_ratio_BT
    loss_BT, clipped_BT = _clipped_surrogate(gradient_BT.exp(), advantages_BT, low=low, high=high)
    bound_BT = -advantages_BT * clip_ratio_c
    too_low_BT = (advantages_BT < 0) & (loss_BT > bound_BT)
    loss_BT = torch.where(too_low_BT, bound_BT, loss_BT)
    clipped_BT = clipped_BT | too_low_BT
    if enable_sequence_masking:
        drift_B = row_means(-log_ratio_BT.detach(), inputs.mask_BT)
        dropped_BT = (advantages_BT < 0) & (drift_B > delta_sequence_masking).unsqueeze(1)
        loss_BT = loss_BT.masked_fill(dropped_BT, 0.0)
        clipped_BT = clipped_BT | dropped_BT
    return PolicyLoss(loss_BT, _detached_ratio(log_ratio_BT), clipped_BT)


def opmd_loss(inputs: PolicyInputs, *, tau: NonNegative = 1.0) -> PolicyLoss:
    """−A log π / (1 + τ)."""
    return _unclipped(inputs, -inputs.advantages_BT * inputs.logprobs_BT / (1.0 + tau))


def topr_loss(
    inputs: PolicyInputs,
    *,
    advantage_threshold: float = 0.0,
    ratio_level: Literal["sequence", "token"] = "sequence",
) -> PolicyLoss:
    """−sg(α) A log π with α = clip(r, 0, 1) where A ≤ threshold, else 1; r of the whole response."""
    log_ratio_BT = _log_ratio(inputs).detach()
    if ratio_level == "sequence":
        log_ratio_BT = log_ratio_BT.sum(dim=1, keepdim=True).expand_as(log_ratio_BT)
    weighted_BT = inputs.advantages_BT <= advantage_threshold
    alpha_BT = torch.where(weighted_BT, log_ratio_BT.clamp(max=0.0), 0.0).exp()
    ratio_BT = log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped_BT = weighted_BT & (log_ratio_BT > 0)
    return PolicyLoss(-alpha_BT * inputs.advantages_BT * inputs.logprobs_BT, ratio_BT, clipped_BT)


def cispo_loss(
    inputs: PolicyInputs,
    *,
    clip_range_low: NonNegative = 1.0,
    clip_range_high: NonNegative = 0.28,
    enable_mask_clip: bool = False,
    mask_clip_range_low: NonNegative = 1.0,
    mask_clip_range_high: NonNegative = 0.28,
) -> PolicyLoss:
    """−A sg(clip(r, 1−ε_l, 1+ε_h)) log π: the weight is clipped, the gradient is kept."""
    ratio_BT = _log_ratio(inputs).detach().exp()
    weight_BT = ratio_BT.clamp(1.0 - clip_range_low, 1.0 + clip_range_high)
    clipped_BT = weight_BT != ratio_BT
    loss_BT = -inputs.advantages_BT * weight_BT * inputs.logprobs_BT
    if enable_mask_clip:
        inside_BT = _one_sided(
            inputs.advantages_BT, ratio_BT, low=mask_clip_range_low, high=mask_clip_range_high
        )
        loss_BT = torch.where(inside_BT, loss_BT, 0.0)
        clipped_BT = clipped_BT | ~inside_BT
    return PolicyLoss(loss_BT, ratio_BT, clipped_BT)


def gspo_loss(
    inputs: PolicyInputs, *, clip_range_low: NonNegative = 3e-4, clip_range_high: NonNegative = 4e-4
) -> PolicyLoss:
    """PPO's clip on the length-normalized ratio of the response, s = exp(mean log r), at every token."""
    log_ratio_BT = _sequence_log_ratio(inputs)
    ratio_BT = (log_ratio_BT + _own_log_ratio(inputs)).exp()
    loss_BT, clipped_BT = _clipped_surrogate(
        ratio_BT, inputs.advantages_BT, low=clip_range_low, high=clip_range_high
    )
    return PolicyLoss(loss_BT, log_ratio_BT.exp(), clipped_BT)


def sapo_loss(inputs: PolicyInputs, *, tau_pos: Positive = 1.0, tau_neg: Positive = 1.05) -> PolicyLoss:
    """−A (4/τ) σ(τ(r−1)): a soft gate whose gradient fades as r leaves 1, on both sides."""
    log_ratio_BT = _log_ratio(inputs)
    tau_BT = torch.full_like(log_ratio_BT, tau_neg).masked_fill(inputs.advantages_BT > 0, tau_pos)
    gate_BT = 4.0 / tau_BT * torch.sigmoid(tau_BT * (log_ratio_BT.exp() - 1.0))
    return _unclipped(inputs, -inputs.advantages_BT * gate_BT)


def sppo_loss(inputs: PolicyInputs, *, epsilon: NonNegative = 0.3) -> PolicyLoss:
    """−A log r where 1/(1+ε) ≤ r ≤ 1+ε, else 0."""
    log_ratio_BT = _log_ratio(inputs)
    outside_BT = log_ratio_BT.detach().abs() > math.log1p(epsilon)
    loss_BT = (-inputs.advantages_BT * log_ratio_BT).masked_fill(outside_BT, 0.0)
    return PolicyLoss(loss_BT, _detached_ratio(log_ratio_BT), outside_BT)


def importance_sampling_loss(inputs: PolicyInputs) -> PolicyLoss:
    """−A r, unclipped."""
    return _unclipped(inputs, -inputs.advantages_BT * _log_ratio(inputs).exp())


def sft_loss(inputs: PolicyInputs) -> PolicyLoss:
    """−log π."""
    return _unclipped(inputs, -inputs.logprobs_BT)


def sft_is_loss(inputs: PolicyInputs) -> PolicyLoss:
    """−sg(p) log π: tokens the policy finds unlikely pull less."""
    return _unclipped(inputs, -inputs.logprobs_BT.detach().exp() * inputs.logprobs_BT)


def sft_phi_loss(inputs: PolicyInputs, *, cutoff_prob: PositiveShare = 1.0) -> PolicyLoss:
    """−sg(p(1−p)) log π, with p of at most the cutoff in log π: sure and hopeless tokens pull least."""
    prob_BT = inputs.logprobs_BT.detach().exp()
    capped_BT = inputs.logprobs_BT.clamp(max=math.log(cutoff_prob))
    loss = _unclipped(inputs, -prob_BT * (1.0 - prob_BT) * capped_BT)
    return PolicyLoss(loss.per_token_BT, loss.ratio_BT, prob_BT > cutoff_prob)


RecClipMode = Literal["none", "one-side", "two-side", "ring", "gspo-one-side"]
RecWeight = Literal["none", "importance_sampling", "gspo_importance_sampling", "advantage"]


def rec_loss(
    inputs: PolicyInputs,
    *,
    epsilon_low: NonNegative = 0.2,
    epsilon_high: NonNegative = 0.2,
    epsilon_low_prime: NonNegative = 0.6,
    epsilon_high_prime: NonNegative = 2.0,
    clip_mode: RecClipMode = "none",
    weight: RecWeight = "none",
    temp: Positive = 1.0,
    regularizer: Literal["none", "k2", "forward-kl"] = "none",
    regularizer_coef: NonNegative = 0.0,
) -> PolicyLoss:
    """−w A log π where r is in range, plus a pull towards the sampled tokens."""
    log_ratio_BT = _log_ratio(inputs)
    ratio_BT = _detached_ratio(log_ratio_BT)
    sequence_ratio_BT = _sequence_log_ratio(inputs).exp()
    advantages_BT = inputs.advantages_BT
    bounded_BT = sequence_ratio_BT if clip_mode == "gspo-one-side" else ratio_BT
    inside_BT = _rec_range(bounded_BT, advantages_BT, clip_mode, low=epsilon_low, high=epsilon_high)
    if clip_mode == "ring":
        inside_BT = inside_BT | (advantages_BT >= 0) & (ratio_BT <= 1.0 - epsilon_low_prime)
        inside_BT = inside_BT | (advantages_BT <= 0) & (ratio_BT >= 1.0 + epsilon_high_prime)
    weights_BT = {
        "none": torch.ones_like(ratio_BT),
        "importance_sampling": ratio_BT,
        "gspo_importance_sampling": sequence_ratio_BT,
        "advantage": (advantages_BT / temp).exp(),
    }[weight]
    loss_BT = torch.where(inside_BT, -weights_BT * advantages_BT * inputs.logprobs_BT, 0.0)
    if regularizer == "k2":
        loss_BT = loss_BT + regularizer_coef * log_ratio_BT.square()
    elif regularizer == "forward-kl":
        loss_BT = loss_BT - regularizer_coef * inputs.logprobs_BT
    return PolicyLoss(loss_BT, bounded_BT, ~inside_BT)


def _log_ratio(inputs: PolicyInputs) -> Tensor:
    delta_BT = masked(inputs.logprobs_BT - inputs.old_logprobs_BT, inputs.mask_BT)
    return delta_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _own_log_ratio(inputs: PolicyInputs) -> Tensor:
    """log(π/sg(π)): zero, with the gradient of log π."""
    return masked(inputs.logprobs_BT - inputs.logprobs_BT.detach(), inputs.mask_BT)


def _sequence_log_ratio(inputs: PolicyInputs) -> Tensor:
    """The row's mean log r at each of its tokens, without gradient."""
    log_ratio_BT = _log_ratio(inputs).detach()
    return row_means(log_ratio_BT, inputs.mask_BT).unsqueeze(1).expand_as(log_ratio_BT)


def _detached_ratio(log_ratio_BT: Tensor) -> Tensor:
    return log_ratio_BT.detach().exp()


def _unclipped(inputs: PolicyInputs, loss_BT: Tensor) -> PolicyLoss:
    nothing_BT = torch.zeros_like(inputs.mask_BT, dtype=torch.bool)
    return PolicyLoss(loss_BT, _detached_ratio(_log_ratio(inputs)), nothing_BT)


def _clipped_surrogate(
    ratio_BT: Tensor, advantages_BT: Tensor, *, low: float, high: float
) -> tuple[Tensor, Tensor]:
    free_BT = -advantages_BT * ratio_BT
    bound_BT = -advantages_BT * ratio_BT.clamp(1.0 - low, 1.0 + high)
    return torch.maximum(free_BT, bound_BT), bound_BT > free_BT


def _one_sided(advantages_BT: Tensor, ratio_BT: Tensor, *, low: float, high: float) -> Tensor:
    """False where the step would go further from the sampling policy than the range allows."""
    too_high_BT = (advantages_BT > 0) & (ratio_BT > 1.0 + high)
    too_low_BT = (advantages_BT < 0) & (ratio_BT < 1.0 - low)
    return ~(too_high_BT | too_low_BT)


def _rec_range(
    ratio_BT: Tensor, advantages_BT: Tensor, clip_mode: RecClipMode, *, low: float, high: float
) -> Tensor:
    if clip_mode == "none":
        return torch.ones_like(ratio_BT, dtype=torch.bool)
    if clip_mode in ("one-side", "gspo-one-side"):
        return _one_sided(advantages_BT, ratio_BT, low=low, high=high)
    return (ratio_BT >= 1.0 - low) & (ratio_BT <= 1.0 + high)


POLICY_LOSSES: dict[str, PolicyLossFunction] = {
    "ppo": ppo_loss,
    "opmd": opmd_loss,
    "topr": topr_loss,
    "cispo": cispo_loss,
    "gspo": gspo_loss,
    "sapo": sapo_loss,
    "sppo": sppo_loss,
    "rec": rec_loss,
    "importance_sampling": importance_sampling_loss,
    "sft": sft_loss,
    "sft_is": sft_is_loss,
    "sft_phi": sft_phi_loss,
}
