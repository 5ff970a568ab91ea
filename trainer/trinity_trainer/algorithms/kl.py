"""Estimators of KL(policy ‖ reference) from the log-probs of the sampled tokens, token by token.

With Δ = log π − log π_ref. A gradient flows through the policy only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trinity_trainer.algorithms.policy_losses import MAX_LOG_RATIO

# log-probs [B, T] of the policy, of the reference, and of the policy that sampled
KlFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


def k1(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, old_logprobs_BT: Tensor) -> Tensor:
    """Δ: unbiased, of high variance, negative for some tokens."""
    return logprobs_BT - ref_logprobs_BT


def k2(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, old_logprobs_BT: Tensor) -> Tensor:
    """Δ²/2: its gradient is that of the KL when on-policy."""
    return 0.5 * (logprobs_BT - ref_logprobs_BT).square()


def k3(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, old_logprobs_BT: Tensor) -> Tensor:
    """e^−Δ − 1 + Δ: unbiased and never negative."""
    return _k3_of(logprobs_BT - ref_logprobs_BT)


def low_var_kl(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, old_logprobs_BT: Tensor) -> Tensor:
    """k3 that cannot overflow: Δ within ±20, the result within ±10."""
    return _k3_of((logprobs_BT - ref_logprobs_BT).clamp(-20, 20)).clamp(-10, 10)


def absolute(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, old_logprobs_BT: Tensor) -> Tensor:
    """|Δ|."""
    return (logprobs_BT - ref_logprobs_BT).abs()


def corrected_k2(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, old_logprobs_BT: Tensor) -> Tensor:
    """sg(r) k2 with r = π/π_old: its gradient is that of the KL on off-policy tokens too."""
    return _ratio(logprobs_BT, old_logprobs_BT).detach() * k2(logprobs_BT, ref_logprobs_BT, old_logprobs_BT)


def corrected_k3(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, old_logprobs_BT: Tensor) -> Tensor:
    """r k3 with r = π/π_old and its gradient (2512.02556):
    value and gradient are the KL's, off-policy too.
    """
    return _ratio(logprobs_BT, old_logprobs_BT) * _k3_of(logprobs_BT - ref_logprobs_BT)


def _ratio(logprobs_BT: Tensor, old_logprobs_BT: Tensor) -> Tensor:
    return (logprobs_BT - old_logprobs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _k3_of(delta_BT: Tensor) -> Tensor:
    return torch.expm1(-delta_BT) + delta_BT


KL_FUNCTIONS: dict[str, KlFunction | None] = {
    "none": None,
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "low_var_kl": low_var_kl,
    "abs": absolute,
    "corrected_k2": corrected_k2,
    "corrected_k3": corrected_k3,
}
