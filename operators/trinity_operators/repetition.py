"""Responses that repeat themselves: the share of their n-grams that came before in the same response.

1 − (distinct n-grams) / (n-grams), over the tokens of a response; 0 for one of fewer than n tokens. It is the
repetition reward of Hugging Face's open-r1, over tokens in place of words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import numpy as np
import pyarrow as pa
from pydantic import Field

from trinity_operators.base import Column, Filter, FilterResult, Floats, Mapper, float_column
from trinity_operators.filters import within
from trinity_operators.ngrams import Ngrams

_READS = ("token_ids", "prompt_length")

Positive = Annotated[int, Field(gt=0)]


class RepetitionPenalty(Mapper):
    """Takes `penalty_factor` × the repeated share of a response's n-grams from its reward."""

    name = "repetition_penalty"
    reads = ("reward", *_READS)
    writes = ("reward", "repetition")

    def __init__(self, ngram_size: Positive = 3, penalty_factor: float = 1.0) -> None:
        self.ngram_size, self.penalty_factor = ngram_size, penalty_factor

    def map(self, rows: pa.Table) -> Mapping[str, Column]:
        repetition = repeated_share(rows, self.ngram_size)
        rewards = float_column(rows, "reward") - self.penalty_factor * repetition
        return {"reward": rewards, "repetition": repetition}


class RepetitionFilter(Filter):
    """Drops experiences of whose n-grams more than `max_share` are repeated."""

    name = "repetition_filter"
    reads = _READS
    writes = ("repetition",)

    def __init__(
        self, max_share: Annotated[float, Field(ge=0, le=1)] = 0.5, ngram_size: Positive = 3
    ) -> None:
        self.max_share, self.ngram_size = max_share, ngram_size

    def apply(self, rows: pa.Table) -> FilterResult:
        repetition = repeated_share(rows, self.ngram_size)
        result = within(repetition, None, self.max_share, what=f"share of repeated {self.ngram_size}-grams")
        return FilterResult(result.keep, result.reason, repetition, {"repetition": repetition})


def repeated_share(rows: pa.Table, ngram_size: int) -> Floats:
    """For each row the share of its response's n-grams that are not the first of their kind."""
    ngrams = Ngrams.of_responses(rows, ngram_size)
    counts_R = ngrams.counts_R()
    return np.where(counts_R > 0, 1.0 - ngrams.distinct().counts_R() / np.maximum(counts_R, 1.0), 0.0)
