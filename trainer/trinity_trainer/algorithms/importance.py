"""Weights that correct for tokens sampled by one implementation of the policy and trained by another.

The engine's log-probs and the trainer's differ by rounding, quantization or staleness;
the weight is their ratio, bounded from above so that no single token rules a step. [B, T] response tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trinity_trainer.algorithms.aggregation import masked


def truncated_importance_weights(
    sampled_logprobs_BT: Tensor,
    recomputed_logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    cap: float = 2.0,
    level: Literal["token", "sequence"] = "token",
) -> Tensor:
    """min(π_recomputed/π_sampled, cap) per token, or of the product over a row at all its tokens.

    No gradient.
    """
    log_weight_BT = masked((recomputed_logprobs_BT - sampled_logprobs_BT).detach(), mask_BT)
    if level == "sequence":
        log_weight_BT = log_weight_BT.sum(dim=1, keepdim=True).expand_as(log_weight_BT)
    # bounded before exp, so that a hopeless token cannot overflow
    bound = torch.tensor(cap, dtype=log_weight_BT.dtype, device=log_weight_BT.device).log()
    return torch.minimum(log_weight_BT, bound).exp()
