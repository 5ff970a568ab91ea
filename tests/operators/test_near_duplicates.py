"""Near duplicates: what the signatures estimate, and which rows are dropped."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from trinity_operators.near_duplicates import NearDuplicateFilter, minhash, rows_per_band

WORDS = " ".join(f"w{number}" for number in range(40))


def texts(*values: str | None) -> pa.Table:
    return pa.table({"response_text": pa.array(values, pa.string())})


def test_the_share_of_equal_places_estimates_the_jaccard_index() -> None:
    # 40 and 44 single words, 40 of them in common
    longer = f"{WORDS} a b c d"
    one, two = minhash(texts(WORDS, longer)["response_text"], 1, 1024)
    assert (one == two).mean() == pytest.approx(40 / 44, abs=0.03)
    assert (one == minhash(texts("something else")["response_text"], 1, 1024)[0]).mean() < 0.01


def test_a_signature_is_of_the_text_alone() -> None:
    rows = texts(WORDS, "a b", WORDS.upper(), "", None, " ")
    together = minhash(rows["response_text"], 3, 16)
    alone = [minhash(rows.slice(number, 1)["response_text"], 3, 16)[0] for number in range(rows.num_rows)]
    np.testing.assert_array_equal(together, np.stack(alone))
    np.testing.assert_array_equal(together[0], together[2])
    np.testing.assert_array_equal(together[3], together[5])


def test_a_text_like_an_earlier_one_is_dropped_across_tables() -> None:
    operator = NearDuplicateFilter()
    first = operator.apply(texts(WORDS, "quite another text of a few words", WORDS))
    assert first.keep.tolist() == [True, True, False]
    # of 38 trigrams one more, of 39: index 38/39
    second = operator.apply(texts(f"{WORDS} more", "nothing like it at all"))
    assert second.keep.tolist() == [False, True]
    assert np.asarray(second.value)[0] == pytest.approx(38 / 39, abs=0.06)
    assert second.reason == "response_text is like that of an earlier row (Jaccard index at least 0.8)"


def test_half_the_words_are_not_alike() -> None:
    half = " ".join(WORDS.split()[:20] + [f"v{number}" for number in range(20)])
    assert NearDuplicateFilter().apply(texts(WORDS, half)).keep.tolist() == [True, True]


@pytest.mark.parametrize(("threshold", "length"), [(0.8, 6), (0.5, 3), (1.0, 128)])
def test_bands_are_as_long_as_they_may_be(threshold: float, length: int) -> None:
    assert rows_per_band(128, threshold) == length
    # 21 bands of 6 find 0.8 with probability 0.998, 18 of 7 with 0.986


def test_rows_of_one_table_are_compared_as_rows_of_several() -> None:
    rows = texts(*(f"{WORDS} {number % 5}" if number % 3 else f"text {number}" for number in range(30)))
    at_once = NearDuplicateFilter().apply(rows)
    operator = NearDuplicateFilter()
    one_by_one = [operator.apply(rows.slice(number, 1)) for number in range(30)]
    assert at_once.keep.tolist() == [bool(each.keep[0]) for each in one_by_one]
    # ten short texts, each unlike the others, and the first of twenty alike
    assert at_once.keep.sum() == 11
    values = [np.asarray(each.value)[0] for each in one_by_one]
    np.testing.assert_array_equal(np.asarray(at_once.value), values)
