"""The n-grams of texts, as numbers: sequences of n tokens or words, each a hash of 64 bits.

R rows, M n-grams of all rows together, in the order of the rows.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.schema import filled, lists_of, values_of
from trinity_operators.base import Codes, Floats, float_column

Hashes = npt.NDArray[np.uint64]

# odd, so that no token is lost in a product modulo 2^64
_BASE = np.uint64(0x9E3779B97F4A7C15)
_PAST_THE_END = np.uint64(1)
"""What fills up a sequence that is shorter than n."""


@dataclass(frozen=True)
class Ngrams:
    """Those of a table. Equal n-grams have equal hashes, of whichever rows they are."""

    hashes_M: Hashes
    rows_M: Codes
    """The number of the row that each belongs to."""
    num_rows: int

    @staticmethod
    def of_responses(rows: pa.Table, size: int) -> Ngrams:
        """Of the tokens of responses."""
        tokens_T, starts_R, lengths_R = response_tokens(rows)
        return _ngrams(mixed(tokens_T.astype(np.uint64)), starts_R, lengths_R, size)

    @staticmethod
    def of_words(texts: pa.ChunkedArray[Any], size: int) -> Ngrams:
        """Of the words of texts in lower case; a text without a word has one n-gram, as other such texts."""
        lowered: Any = pc.utf8_lower(pc.utf8_trim_whitespace(filled(texts, "")))
        lists = pc.utf8_split_whitespace(lowered).combine_chunks()
        words = lists.flatten().dictionary_encode()
        digests = (
            hashlib.blake2b(each.encode(), digest_size=8).digest() for each in values_of(words.dictionary)
        )
        hashes = np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)
        lengths_R = np.asarray(lists.value_lengths().to_numpy(zero_copy_only=False), dtype=np.int64)
        words_T = hashes[words.indices.to_numpy(zero_copy_only=False)]
        return _ngrams(words_T, np.cumsum(lengths_R) - lengths_R, lengths_R, size)

    def distinct(self) -> Ngrams:
        """Each n-gram of a row once."""
        bits = np.uint64(max(self.num_rows.bit_length(), 1))
        # one number each, which sorts many times faster than two
        keys_M = (self.rows_M.astype(np.uint64) << (np.uint64(64) - bits)) | (self.hashes_M >> bits)
        order = np.argsort(keys_M)
        keys_M = keys_M[order]
        first_M = np.ones(len(keys_M), dtype=np.bool_)
        first_M[1:] = keys_M[1:] != keys_M[:-1]
        chosen = order[first_M]
        return Ngrams(self.hashes_M[chosen], self.rows_M[chosen], self.num_rows)

    def counts_R(self) -> Floats:
        """How many n-grams each row has."""
        return np.bincount(self.rows_M, minlength=self.num_rows).astype(np.float64)


def response_tokens(rows: pa.Table) -> tuple[Codes, Codes, Codes]:
    """The tokens of all rows one after another, and where the response of each row starts
    and how long it is.
    """
    lists = lists_of(rows["token_ids"])
    lengths_R = np.nan_to_num(np.asarray(lists.value_lengths().to_numpy(zero_copy_only=False), np.float64))
    ends_R = np.cumsum(lengths_R)
    prompts_R = np.minimum(np.nan_to_num(float_column(rows, "prompt_length")), lengths_R)
    tokens_T = np.asarray(lists.flatten().to_numpy(zero_copy_only=False), dtype=np.int64)
    if not len(tokens_T):
        # something to index where every row is empty
        tokens_T = np.zeros(1, dtype=np.int64)
    starts_R = ends_R - lengths_R + prompts_R
    return tokens_T, starts_R.astype(np.int64), (lengths_R - prompts_R).astype(np.int64)


def _ngrams(units_T: Hashes, starts_R: Codes, lengths_R: Codes, size: int) -> Ngrams:
    """Of sequences of hashes that lie one after another; `starts_R` and `lengths_R` say where.

    A sequence shorter than `size` has one n-gram: all of it; an empty one has none.
    """
    counts_R = np.where(lengths_R > 0, np.maximum(lengths_R - size + 1, 1), 0)
    rows_M = np.repeat(np.arange(len(lengths_R)), counts_R)
    firsts_R = np.cumsum(counts_R) - counts_R
    places_M = np.arange(len(rows_M)) - firsts_R[rows_M] + starts_R[rows_M]
    hashes_M = _rolling(units_T, size)[places_M]
    short_M = lengths_R[rows_M] < size
    if short_M.any():
        hashes_M[short_M] = _whole(units_T, places_M[short_M], lengths_R[rows_M[short_M]], size)
    return Ngrams(mixed(hashes_M), rows_M, len(lengths_R))


def _rolling(units_T: Hashes, size: int) -> Hashes:
    """At each place a hash of the `size` units from there on, over the ends of sequences as well."""
    padded = np.append(units_T, np.zeros(size, dtype=np.uint64))
    hashes_T = np.zeros(len(units_T), dtype=np.uint64)
    for offset in range(size):
        hashes_T = hashes_T * _BASE + padded[offset : offset + len(units_T)]
    return hashes_T


def _whole(units_T: Hashes, starts: Codes, lengths: Codes, size: int) -> Hashes:
    """Hashes of whole sequences, filled up to `size` units."""
    hashes = np.zeros(len(starts), dtype=np.uint64)
    for offset in range(size):
        inside = offset < lengths
        units = units_T[np.where(inside, starts + offset, 0)]
        hashes = hashes * _BASE + np.where(inside, units, _PAST_THE_END)
    return hashes


def mixed(values: Hashes) -> Hashes:
    """The finalizer of MurmurHash3: nearby numbers get hashes far from each other."""
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ (values >> np.uint64(33))
