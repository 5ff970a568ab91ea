"""Whether an engine holds the model that is trained:
its log-probs of a few token sequences against the trainer's.

The trainer computes them when it publishes a version, at temperature 1 and over the whole vocabulary;
every engine computes them after it has loaded that version.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TokenSequences = tuple[tuple[int, ...], ...]

MOST_TOKENS = 64
# prose, arithmetic, code and a list, so that no tokenizer finds all of them strange
TEXTS = (
    "The mill stands where the river leaves the hills. In spring the water is high, "
    "the wheel turns day and night, and"
    " people bring their grain from villages that lie two days away. "
    "In late summer the river is low and the miller repairs what the flood has broken.",
    "Question: A shop sells pencils at 3 coins and notebooks at 12 coins. Ada buys 7 pencils and 2 "
    "notebooks. How much"
    " does she pay? Answer: The pencils cost 7 * 3 = 21 coins, the notebooks cost 2 * 12 = 24 coins, "
    "and together that is 21 + 24 = 45 coins.",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n    return total "
    "/ len(values)\n\n\nprint(mean([1.0, 2.0, 6.0]))  # prints 3.0\nassert mean([4.0]) == 4.0\n",
    "To do on Monday: call the bank, return the library books, water the plants, buy rice, lemons and soap, "
    "write to"
    " the landlord about the broken window, look up the train to the coast, "
    "ask Maria whether she comes along, and book a room for two nights.",
)


@dataclass(frozen=True)
class Probe:
    """Token sequences and the trainer's log-prob of each of their tokens but the first."""

    sequences: TokenSequences
    logprobs: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class ProbeBounds:
    """How far an engine may be off, in nats a token."""

    mean: float
    largest: float


@dataclass(frozen=True)
class ProbeDifference:
    """How far an engine is off, in nats a token."""

    mean: float
    largest: float
    num_tokens: int

    def exceeds(self, bounds: ProbeBounds) -> bool:
        """So too when it is no number."""
        return not (self.mean <= bounds.mean and self.largest <= bounds.largest)

    def metrics(self) -> Mapping[str, float]:
        """By their names in `steps.metrics`."""
        return {"probe/logprob_diff_mean": self.mean, "probe/logprob_diff_max": self.largest}


def probe_sequences(tokenizer: Any, *, max_model_len: int) -> TokenSequences:
    """A few texts as tokens, all of one length, so that no padding is needed.

    Nothing where no two tokens fit.
    """
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    # an engine wants room for a token after them
    length = min(MOST_TOKENS, max_model_len - 1, *map(len, encoded))
    return tuple(tuple(ids[:length]) for ids in encoded) if length >= 2 else ()


def probe_difference(probe: Probe, scores: Sequence[Sequence[float]]) -> ProbeDifference:
    """Of an engine's log-probs from the trainer's."""
    pairs = zip(probe.logprobs, scores, strict=True)
    differences = [abs(a - b) for expected, actual in pairs for a, b in zip(expected, actual, strict=True)]
    # `max` overlooks what is no number
    largest = math.nan if any(map(math.isnan, differences)) else max(differences)
    return ProbeDifference(sum(differences) / len(differences), largest, len(differences))
