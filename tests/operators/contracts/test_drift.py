"""Standardised difference and PSI against numbers computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trinity_operators.contracts.drift import (
    population_stability_index,
    standard_errors_apart,
    standardized_difference,
)


def test_the_standardized_difference_is_in_pooled_standard_deviations() -> None:
    # means 2 and 4, squares 2 and 8 over 3 + 3 - 2 degrees: 2 / sqrt(10 / 4)
    now, before = np.array([3.0, 4.0, 5.0]), np.array([0.0, 2.0, 4.0])
    assert standardized_difference(now, before) == pytest.approx(2 / math.sqrt(2.5))
    assert standardized_difference(before, now) == pytest.approx(-2 / math.sqrt(2.5))


def test_numbers_that_do_not_vary_are_alike_or_infinitely_far_apart() -> None:
    ones, zeros = np.ones(4), np.zeros(4)
    assert standardized_difference(ones, ones) == 0.0
    assert standardized_difference(ones, zeros) == math.inf
    assert standardized_difference(zeros, ones) == -math.inf


def test_standard_errors_are_of_the_means_of_groups() -> None:
    # means 4 and 2, squares 2 and 8 over 2 + 3 - 2 degrees: 2 / sqrt(10 / 3 * (1 / 2 + 1 / 3))
    now, before = np.array([3.0, 5.0]), np.array([0.0, 2.0, 4.0])
    assert standard_errors_apart(now, before) == pytest.approx(2 / math.sqrt(10 / 3 * (1 / 2 + 1 / 3)))
    assert standard_errors_apart(np.ones(2), np.zeros(2)) == math.inf
    # no group varies beside another one
    assert standard_errors_apart(np.ones(1), np.zeros(1)) == 0.0


def test_the_psi_of_equal_distributions_is_0() -> None:
    numbers = np.arange(100.0)
    assert population_stability_index(numbers, np.tile(numbers, 3)) == pytest.approx(0.0)


def test_the_psi_of_two_values_is_the_sum_over_both() -> None:
    now, before = np.array([1.0] * 8 + [0.0] * 2), np.array([1.0] * 5 + [0.0] * 5)
    # p = 0.8 and 0.2, q = 0.5 and 0.5
    expected = 0.3 * math.log(0.8 / 0.5) - 0.3 * math.log(0.2 / 0.5)
    assert population_stability_index(now, before) == pytest.approx(expected)


def test_rewards_that_collapse_to_another_value_are_a_large_psi() -> None:
    # p is 1 where q counts as 0.001, and the other way round
    expected = 2 * 0.999 * math.log(1000)
    assert population_stability_index(np.zeros(8), np.ones(40)) == pytest.approx(expected)
