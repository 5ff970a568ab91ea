"""The comparison of an engine with the trainer, by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from trinity_data.probe import (
    MOST_TOKENS,
    Probe,
    ProbeBounds,
    ProbeDifference,
    probe_difference,
    probe_sequences,
)
from trinity_data.tokenizer import load_tokenizer

BOUNDS = ProbeBounds(mean=0.05, largest=1.0)


def test_the_difference_is_the_mean_and_the_largest_over_all_tokens() -> None:
    probe = Probe(((1, 2, 3), (4, 5, 6)), ((-1.0, -2.0), (-3.0, -4.0)))
    found = probe_difference(probe, [[-1.0, -2.5], [-3.25, -4.0]])
    assert found == ProbeDifference(mean=0.1875, largest=0.5, num_tokens=4)
    assert found.metrics() == {"probe/logprob_diff_mean": 0.1875, "probe/logprob_diff_max": 0.5}


@pytest.mark.parametrize(
    ("mean", "largest", "exceeds"),
    [
        (0.05, 1.0, False),
        (0.051, 0.5, True),
        (0.01, 1.01, True),
        (math.nan, 0.0, True),
        (0.0, math.nan, True),
    ],
)
def test_a_bound_is_exceeded_by_the_mean_the_largest_or_what_is_no_number(
    mean: float, largest: float, exceeds: bool
) -> None:
    assert ProbeDifference(mean, largest, 4).exceeds(BOUNDS) is exceeds


def test_a_logprob_that_is_no_number_is_not_overlooked() -> None:
    probe = Probe(((1, 2, 3),), ((-1.0, -2.0),))
    assert probe_difference(probe, [[math.nan, -2.0]]).exceeds(BOUNDS)
    assert probe_difference(probe, [[-math.inf, -2.0]]).exceeds(BOUNDS)


def test_sequences_are_of_one_length_and_leave_room_for_a_token(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    sequences = probe_sequences(tokenizer, max_model_len=1000)
    assert len(sequences) == 4 and {len(sequence) for sequence in sequences} == {MOST_TOKENS}
    assert sequences == probe_sequences(tokenizer, max_model_len=1000)
    assert {len(sequence) for sequence in probe_sequences(tokenizer, max_model_len=9)} == {8}
    assert probe_sequences(tokenizer, max_model_len=2) == ()
