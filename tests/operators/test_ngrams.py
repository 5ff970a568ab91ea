"""N-grams as numbers: equal ones are equal, in whichever table they stand."""

from __future__ import annotations

import pyarrow as pa

from trinity_operators.ngrams import Ngrams


def hashes(*texts: str) -> list[set[int]]:
    """Of each text, each n-gram of two words once."""
    ngrams = Ngrams.of_words(pa.chunked_array([list(texts)]), 2).distinct()
    sets: list[set[int]] = [set() for _ in texts]
    for row, number in zip(ngrams.rows_M.tolist(), ngrams.hashes_M.tolist(), strict=True):
        assert number not in sets[row]
        sets[row].add(number)
    return sets


def test_a_text_has_the_same_ngrams_in_tables_of_any_length() -> None:
    (alone,) = hashes("a b a b c")
    assert len(alone) == 3
    many = hashes("a b a b c", *(f"x{number}" for number in range(100)))
    assert many[0] == alone


def test_texts_share_what_they_have_in_common() -> None:
    one, two, short = hashes("a b c d", "b c d e", "b")
    assert (len(one & two), len(one | two), len(short & two)) == (2, 4, 0)
