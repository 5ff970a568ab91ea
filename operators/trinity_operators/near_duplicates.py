"""Texts that are nearly the same as an earlier one: MinHash signatures, found again by bands.

The share of equal places of two signatures estimates the Jaccard index of the two sets of n-grams
(Broder 1997). Signatures that agree in all places of one of their bands are compared. R rows, P places.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field

from trinity_operators.base import Bools, Filter, FilterResult, Floats
from trinity_operators.ngrams import Hashes, Ngrams, mixed

Signatures = npt.NDArray[np.uint32]

_SEED = 7
_BLOCK = 1 << 14
"""N-grams at once: they stay in the cache of a core while the places are filled."""


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
        # of the signatures with the same key the number of the first, and of the others, which are few
        self._first: dict[int, int] = {}
        self._others: dict[int, list[int]] = {}
        self._num_saved = 0

    def add(self, signatures_RP: Signatures) -> Floats:
        """For each the similarity with the most similar one before it, 0 where none shares a band.

        Adds those that are below the threshold.
        """
        similar_R = np.zeros(len(signatures_RP))
        keys_RB = self._keys(signatures_RP)
        alone_R = self._share_no_band(keys_RB)
        self._insert(signatures_RP[alone_R], keys_RB[alone_R])
        for row in np.flatnonzero(~alone_R):
            signature, keys = signatures_RP[row], keys_RB[row]
            known = [key for key in keys.tolist() if key in self._first]
            candidates = {n for key in known for n in (self._first[key], *self._others.get(key, ()))}
            if candidates:
                others = np.stack([self._signatures[number] for number in candidates])
                similar_R[row] = float((others == signature).mean(axis=1).max())
            if similar_R[row] < self.threshold:
                self._insert(signature[None], keys[None])
        return similar_R

    def unsaved(self) -> bytes:
        """The signatures added since this was last called."""
        new = b"".join(signature.tobytes() for signature in self._signatures[self._num_saved :])
        self._num_saved = len(self._signatures)
        return new

    def load(self, data: bytes) -> None:
        """Adds what `unsaved` returned; ValueError where that was of another number of places."""
        signatures_RP = np.frombuffer(data, dtype=np.uint32).reshape(-1, self.num_places)
        self._insert(signatures_RP, self._keys(signatures_RP))
        self._num_saved = len(self._signatures)

    def _share_no_band(self, keys_RB: Hashes) -> Bools:
        """Whether each row is the only one with its keys, here and among those before: most rows are."""
        _, which, counts = np.unique(keys_RB, return_inverse=True, return_counts=True)
        is_new_RB = counts[which].reshape(keys_RB.shape) == 1
        known = np.fromiter(map(self._first.__contains__, keys_RB.ravel().tolist()), np.bool_, keys_RB.size)
        alone_R: Bools = (is_new_RB & ~known.reshape(keys_RB.shape)).all(axis=1)
        return alone_R

    def _insert(self, signatures_RP: Signatures, keys_RB: Hashes) -> None:
        for number, keys in enumerate(keys_RB.tolist(), len(self._signatures)):
            for key in keys:
                if self._first.setdefault(key, number) != number:
                    self._others.setdefault(key, []).append(number)
        self._signatures += list(signatures_RP)

    def _keys(self, signatures_RP: Signatures) -> Hashes:
        """For each band a hash of its number and its places. Places that fill no band are left out."""
        length = self.rows_per_band
        keys_RB = np.empty((len(signatures_RP), self.num_places // length), dtype=np.uint64)
        for band in range(keys_RB.shape[1]):
            keys_R = np.full(len(signatures_RP), band, dtype=np.uint64)
            for place in range(band * length, (band + 1) * length):
                keys_R = mixed(keys_R + signatures_RP[:, place])
            keys_RB[:, band] = keys_R
        return keys_RB


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
    """A signature for each text: in each place the smallest of its n-grams' hashes under one permutation.

    A permutation is the upper half of a·x + b modulo 2^64 with an odd a (Dietzfelbinger et al. 1997).
    """
    ngrams = Ngrams.of_words(texts, ngram_size)
    random = np.random.default_rng(_SEED)
    factors_P = random.integers(0, 2**64, size=num_places, dtype=np.uint64) | np.uint64(1)
    terms_P = random.integers(0, 2**64, size=num_places, dtype=np.uint64)
    signatures_PR = np.empty((num_places, ngrams.num_rows), dtype=np.uint32)
    bounds = np.append(0, np.cumsum(ngrams.counts_R().astype(np.int64)))
    row = 0
    while row < ngrams.num_rows:
        # many short texts at once, and of long ones a few
        end = int(np.searchsorted(bounds, bounds[row] + _BLOCK, side="right")) - 1
        end = min(max(end, row + 1), ngrams.num_rows)
        part_M, starts_R = ngrams.hashes_M[bounds[row] : bounds[end]], bounds[row:end] - bounds[row]
        permuted_M = np.empty_like(part_M)
        for place in range(num_places):
            np.multiply(part_M, factors_P[place], out=permuted_M)
            permuted_M += terms_P[place]
            signatures_PR[place, row:end] = np.minimum.reduceat(permuted_M, starts_R) >> np.uint64(32)
        row = end
    return np.ascontiguousarray(signatures_PR.T)
