"""The entropy bonus: minus its coefficient times the aggregated entropy of the policy's
next-token distribution.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_entropy(logits_BTV: Tensor) -> Tensor:
    """H = −Σ p log p in nats, over the last axis; a logit of −inf counts nothing."""
    logprobs_BTV = torch.log_softmax(logits_BTV, dim=-1)
    entropy_BT: Tensor = torch.special.entr(logprobs_BTV.exp()).sum(dim=-1)
    return entropy_BT
