"""From per-token numbers to one loss, with the denominators of the whole batch.

A micro-batch returns its part of the mean, never a mean of its own: parts sum to the loss of the batch,
however its rows were split over micro-batches and ranks. B rows, T tokens of the widest response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from trinity_data.config.algorithm_registry import LossAggMode

LOSS_AGG_MODES: tuple[str, ...] = get_args(LossAggMode)


@dataclass(frozen=True)
class Denominators:
    """What the parts of a batch are divided by. Counted once, over all its rows."""

    num_tokens: int
    """Trained tokens."""
    num_sequences: int
    """Rows with at least one trained token; a row of padding is none."""
    num_pairs: int
    """Pairs of neighbours (rows 0 and 1, 2 and 3, …) that both have trained tokens."""
    max_response_tokens: int
    """What a response may have: a constant of the stage, not the longest of a batch."""

    @staticmethod
    def of(tokens_of_rows: Sequence[int], *, max_response_tokens: int) -> Denominators:
        """From the number of trained tokens of each row of the batch, in its order."""
        pairs = zip(tokens_of_rows[0::2], tokens_of_rows[1::2], strict=False)
        return Denominators(
            num_tokens=sum(tokens_of_rows),
            num_sequences=sum(tokens > 0 for tokens in tokens_of_rows),
            num_pairs=sum(first > 0 and second > 0 for first, second in pairs),
            max_response_tokens=max_response_tokens,
        )


def masked(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Values with zeros where nothing is trained; an inf or NaN in the padding does not get out."""
    return torch.where(
        mask_BT.bool(), values_BT, torch.zeros((), dtype=values_BT.dtype, device=values_BT.device)
    )


def row_means(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """For each row the mean over its trained tokens; 0 for a row without any."""
    return masked(values_BT, mask_BT).sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)


def aggregate_rows(per_token_BT: Tensor, mask_BT: Tensor, mode: str, denominators: Denominators) -> Tensor:
    """For each row its share [B] of the batch's aggregate; the shares of all rows sum to it."""
    num_sequences = max(denominators.num_sequences, 1)
    if mode == "seq-mean-token-mean":
        return row_means(per_token_BT, mask_BT) / num_sequences
    sums_B = masked(per_token_BT, mask_BT).sum(dim=1)
    if mode == "token-mean":
        return sums_B / max(denominators.num_tokens, 1)
    if mode == "seq-mean-token-sum":
        return sums_B / num_sequences
    assert mode == "seq-mean-token-sum-norm", mode
    # the constant of Dr. GRPO (2503.20783): longer answers weigh more, and equally so in every step
    return sums_B / max(denominators.num_sequences * denominators.max_response_tokens, 1)


def aggregate(per_token_BT: Tensor, mask_BT: Tensor, mode: str, denominators: Denominators) -> Tensor:
    """This part's share of the batch's aggregate, a scalar to call `backward` on."""
    return aggregate_rows(per_token_BT, mask_BT, mode, denominators).sum()
