"""How certain the policy was of a response, by the log-probs that the engine noted for the sampled tokens.

Kang et al. 2025 (arXiv 2502.18581) define self-certainty over the whole vocabulary of V tokens, with p_j the
probability of token j at a position: the mean over positions of KL(U‖p) = −1/V Σ_j log(V p_j). Engines note
no more than the log-prob of the sampled token and, of a cut distribution, which tokens were left, so that
sum is not known. What is computed here is the mean log-prob of the sampled tokens. At each position it is
one sample of Σ_j p_j log p_j = KL(p‖U) − log V: the divergence in the other direction, less a constant, with
the noise of the sampling, which the mean over positions reduces. It is 0 for a response that could not have
been another, and lower for a less likely one. Log-probs are of the distribution that was sampled from, after
temperature and top-p/top-k.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from trinity_data.schema import lists_of
from trinity_operators.base import Bools, Codes, Column, Floats, Mapper


class SelfCertainty(Mapper):
    """Scores a response as `self_certainty`: the mean log-prob of the tokens that the model sampled.

    This approximates Kang's self-certainty, see above. `tail` takes the last `tail_tokens` of the tokens,
    which hold the answer (Fu et al. 2025, arXiv 2508.15260), `lowest` the least likely one. A response
    without log-probs has no score.
    """

    name = "self_certainty"
    version = "2, sampled log-probs"
    reads = ("logprobs", "action_mask")
    writes = ("self_certainty",)

    def __init__(
        self,
        aggregation: Literal["mean", "tail", "lowest"] = "mean",
        tail_tokens: Annotated[int, Field(gt=0)] = 64,
    ) -> None:
        self.aggregation, self.tail_tokens = aggregation, tail_tokens

    def map(self, rows: pa.Table) -> Mapping[str, Column]:
        logprobs_T, owners_T = _sampled(rows)
        counts_R = np.bincount(owners_T, minlength=rows.num_rows)
        if self.aggregation == "tail":
            from_end_T = np.cumsum(counts_R)[owners_T] - np.arange(len(owners_T))
            last_T: Bools = from_end_T <= self.tail_tokens
            logprobs_T, owners_T = logprobs_T[last_T], owners_T[last_T]
            counts_R = np.bincount(owners_T, minlength=rows.num_rows)
        if self.aggregation == "lowest":
            values_R = np.full(rows.num_rows, np.inf)
            np.minimum.at(values_R, owners_T, logprobs_T)
        else:
            sums_R = np.bincount(owners_T, weights=logprobs_T, minlength=rows.num_rows)
            values_R = sums_R / np.maximum(counts_R, 1)
        return {"self_certainty": np.where(counts_R > 0, values_R, np.nan)}


def _sampled(rows: pa.Table) -> tuple[Floats, Codes]:
    """The log-probs of all sampled tokens and the row of each.

    A row whose mask has another length has none.
    """
    logprobs, masks = lists_of(rows["logprobs"]), lists_of(rows["action_mask"])
    lengths_R, mask_lengths_R = _lengths(logprobs), _lengths(masks)
    fits_R = lengths_R == mask_lengths_R
    owners_T = np.repeat(np.arange(rows.num_rows), lengths_R)
    values_T = np.asarray(logprobs.flatten().to_numpy(zero_copy_only=False), dtype=np.float64)
    mask_T = np.asarray(masks.flatten().to_numpy(zero_copy_only=False), dtype=np.bool_)
    # most often, and copying all tokens takes longer than adding them up
    if fits_R.all() and mask_T.all():
        return values_T, owners_T
    chosen_T = fits_R[owners_T]
    chosen_T[chosen_T] = mask_T[np.repeat(fits_R, mask_lengths_R)]
    return values_T[chosen_T], owners_T[chosen_T]


def _lengths(lists: pa.ListArray[Any]) -> Codes:
    """Of each row; 0 where it is null."""
    lengths = np.asarray(lists.value_lengths().to_numpy(zero_copy_only=False), dtype=np.float64)
    return np.nan_to_num(lengths).astype(np.int64)
