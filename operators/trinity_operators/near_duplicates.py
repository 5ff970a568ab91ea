"""Texts that are nearly the same as an earlier one: MinHash signatures, found again by bands.

The share of equal places of two signatures estimates the Jaccard index of the two sets of n-grams
(Broder 1997). Signatures that agree in all places of one of their bands are compared. R rows, P places.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field

from trinity_operators.base import Filter, FilterResult, Floats
from trinity_operators.ngrams import Ngrams, mixed

Signatures = npt.NDArray[np.uint32]

_SEED = 7
_BLOCK = 1 << 22
"""Hashes times places that are in memory at once."""


class NearDuplicateFilter(Filter):
    """Drops a row whose text in `column` is like that of a row seen before, in this table or an earlier one.

    Like means an estimated Jaccard index of at least `threshold`, over n-grams of `ngram_size` words in lower
    case. The first of similar rows is kept, and only kept ones are compared with.
    """

    name = "near_duplicate_filter"
    pure = False
    keeps_state = state_grows = True

    def __init__(
        self,
        column: str = "response_text",
        threshold: Annotated[float, Field(gt=0, le=1)] = 0.8,
        ngram_size: Annotated[int, Field(gt=0)] = 3,
        num_permutations: Annotated[int, Field(gt=0, le=1024)] = 128,
    ) -> None:
        self.column, self.threshold, self.ngram_size = column, threshold, ngram_size
        self.reads = (column,)
        self._seen = SignatureIndex(num_permutations, threshold)

    def state(self) -> bytes:
        return self._seen.unsaved()

    def load(self, state: bytes) -> None:
        self._seen.load(state)

    def apply(self, rows: pa.Table) -> FilterResult:
        signatures_RP = minhash(rows[self.column], self.ngram_size, self._seen.num_places)
        similar_R = self._seen.add(signatures_RP)
        return FilterResult(
            similar_R < self.threshold,
            f"{self.column} is like that of an earlier row (Jaccard index at least {self.threshold:g})",
            similar_R,
        )


class SignatureIndex:
    """Signatures of texts, each unlike the others."""

    def __init__(self, num_places: int, threshold: float) -> None:
        self.num_places, self.threshold = num_places, threshold
        self.rows_per_band = rows_per_band(num_places, threshold)
        self._signatures: list[Signatures] = []
        self._bands: dict[tuple[int, bytes], list[int]] = {}
        self._num_saved = 0

    def add(self, signatures_RP: Signatures) -> Floats:
        """For each the similarity with the most similar one before it, 0 where none shares a band.

        Adds those that are below the threshold.
        """
        similar_R = np.zeros(len(signatures_RP))
        for row, signature in enumerate(signatures_RP):
            keys = list(self._keys(signature))
            candidates = {number for key in keys for number in self._bands.get(key, ())}
            if candidates:
                others = np.stack([self._signatures[number] for number in candidates])
                similar_R[row] = float((others == signature).mean(axis=1).max())
            if similar_R[row] < self.threshold:
                self._insert(signature, keys)
        return similar_R

    def unsaved(self) -> bytes:
        """The signatures added since this was last called."""
        new = b"".join(signature.tobytes() for signature in self._signatures[self._num_saved :])
        self._num_saved = len(self._signatures)
        return new

    def load(self, data: bytes) -> None:
        """Adds what `unsaved` returned; ValueError where that was of another number of places."""
        for signature in np.frombuffer(data, dtype=np.uint32).reshape(-1, self.num_places):
            self._insert(signature, list(self._keys(signature)))
        self._num_saved = len(self._signatures)

    def _insert(self, signature: Signatures, keys: list[tuple[int, bytes]]) -> None:
        for key in keys:
            self._bands.setdefault(key, []).append(len(self._signatures))
        self._signatures.append(signature)

    def _keys(self, signature: Signatures) -> Iterator[tuple[int, bytes]]:
        for band, start in enumerate(range(0, self.num_places, self.rows_per_band)):
            yield band, signature[start : start + self.rows_per_band].tobytes()


def rows_per_band(num_places: int, threshold: float) -> int:
    """The longest bands by which a pair at the threshold is still found with probability 0.99:
    1 − (1 − t^r)^(places / r) (Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, 3.4).
    """
    longest = 1
    for length in range(1, num_places + 1):
        if 1 - (1 - threshold**length) ** (num_places // length) >= 0.99:
            longest = length
    return longest


def minhash(texts: pa.ChunkedArray[Any], ngram_size: int, num_places: int) -> Signatures:
    """A signature for each text: in each place the smallest of its n-grams' hashes with one salt."""
    ngrams = Ngrams.of_words(texts, ngram_size)
    random = np.random.default_rng(_SEED)
    salts_P = random.integers(0, 2**63, size=num_places, dtype=np.uint64)
    signatures_RP = np.empty((ngrams.num_rows, num_places), dtype=np.uint32)
    bounds = np.append(0, np.cumsum(ngrams.counts_R().astype(np.int64)))
    row = 0
    while row < ngrams.num_rows:
        # many short texts at once, and of long ones a few
        end = int(np.searchsorted(bounds, bounds[row] + _BLOCK // num_places, side="right")) - 1
        end = min(max(end, row + 1), ngrams.num_rows)
        part_M1 = ngrams.hashes_M[bounds[row] : bounds[end], None]
        salted_MP = (mixed(part_M1 ^ salts_P) >> np.uint64(32)).astype(np.uint32)
        signatures_RP[row:end] = np.minimum.reduceat(salted_MP, bounds[row:end] - bounds[row], axis=0)
        row = end
    return signatures_RP
