"""pass@k, maj@k and intervals against numbers worked out by hand, by enumeration and by simulation."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest

from trinity_explorer.bench.estimates import (
    Estimate,
    Votes,
    majority_at,
    mean_over_tasks,
    pass_at_k,
    powers_up_to,
)


@pytest.mark.parametrize(
    ("num_rollouts", "num_right", "k", "expected"),
    [
        (4, 0, 2, 0.0),
        (4, 4, 1, 1.0),
        (4, 1, 1, 1 / 4),
        # of six pairs of four, three hold the right one
        (4, 1, 2, 1 / 2),
        (4, 2, 2, 5 / 6),
        (4, 1, 4, 1.0),
        # 1 - C(7, 3) / C(10, 3)
        (10, 3, 3, 1 - 35 / 120),
    ],
)
def test_pass_at_k_is_the_share_of_choices_with_a_right_rollout(
    num_rollouts: int, num_right: int, k: int, expected: float
) -> None:
    assert pass_at_k(num_rollouts, num_right, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_of_many_rollouts_is_not_rounded_away() -> None:
    assert pass_at_k(1000, 1, 1) == pytest.approx(0.001, rel=1e-12)
    assert pass_at_k(1000, 1, 500) == pytest.approx(0.5, rel=1e-12)


def test_k_goes_by_powers_of_two_up_to_the_rollouts() -> None:
    assert [powers_up_to(n) for n in (1, 2, 6, 8)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8)]


@pytest.mark.parametrize(
    ("right", "wrong", "abstained", "expected"),
    [
        # one alone is right with 2/4; two: both right 1/6, one of each 4/6, halved
        (2, [2], 0, {1: 1 / 2, 2: 1 / 6 + 4 / 6 / 2, 4: 1 / 2}),
        (3, [1], 0, {1: 3 / 4, 3: 1.0, 4: 1.0}),
        # without a vote of their own the wrong ones do not outvote one that is right
        (1, [], 3, {1: 1 / 4, 2: 1 / 2, 4: 1.0}),
        (1, [1, 1, 1], 0, {1: 1 / 4, 2: 1 / 4, 4: 1 / 4}),
        (0, [1], 1, {1: 0.0, 2: 0.0}),
    ],
)
def test_the_majority_of_a_few_rollouts_is_as_counted_by_hand(
    right: int, wrong: list[int], abstained: int, expected: dict[int, float]
) -> None:
    votes = (*([Votes(right, 1.0)] if right else []), *(Votes(number, 0.0) for number in wrong))
    assert dict(zip(expected, majority_at(votes, abstained, tuple(expected)), strict=True)) == pytest.approx(
        expected
    )


@pytest.mark.parametrize(
    "answers", ["aabbc", "aaabb--", "abcd--", "aabbccdd", "a-------", "bbbaacc-", "ab", "--"]
)
def test_the_majority_is_the_mean_over_every_choice_of_rollouts(answers: str) -> None:
    """`a` is right, `-` gave no answer."""
    counts = Counter(answers.replace("-", ""))
    votes = tuple(Votes(number, float(answer == "a")) for answer, number in counts.items())
    ks = tuple(range(1, len(answers) + 1))
    found = majority_at(votes, answers.count("-"), ks)
    for k, chance in zip(ks, found, strict=True):
        chosen = [Counter(each for each in choice if each != "-") for choice in combinations(answers, k)]
        shares = [_share_of_a(each) for each in chosen]
        assert chance == pytest.approx(float(sum(shares) / len(shares)), abs=1e-12)


def _share_of_a(counts: Counter[str]) -> Fraction:
    most = [answer for answer, number in counts.items() if number == max(counts.values())]
    return Fraction("a" in most, len(most) or 1)


def test_an_answer_that_the_reward_takes_now_and_then_is_right_to_that_share() -> None:
    assert majority_at((Votes(2, 0.5), Votes(1, 0.0)), 0, (3,)) == (0.5,)


def test_the_majority_of_many_rollouts_is_near_that_of_draws() -> None:
    votes = (Votes(20, 1.0), Votes(25, 0.0), Votes(10, 0.0))
    (chance,) = majority_at(votes, 9, (16,))
    answers = np.repeat([0, 1, 2, 3], [20, 25, 10, 9])
    rng = np.random.default_rng(0)
    right = []
    for _ in range(4000):
        counts = np.bincount(rng.choice(answers, 16, replace=False), minlength=4)[:3]
        winners = np.flatnonzero(counts == counts.max())
        right.append(float(0 in winners) / len(winners))
    assert chance == pytest.approx(np.mean(right), abs=3 * np.std(right) / 4000**0.5)


def test_the_interval_of_single_rollouts_is_wilsons() -> None:
    # 8 of 10: (0.8 + z²/20 ± z √(0.016 + z²/400)) / (1 + z²/10), to three digits 0.490 and 0.943; the
    # tasks are worth 0.16 / (s² / 10) = 9 rollouts, no fewer than there are tasks
    estimate = mean_over_tasks([1.0] * 8 + [0.0] * 2, num_rollouts=1)
    assert (estimate.value, round(estimate.low, 3), round(estimate.high, 3)) == (0.8, 0.49, 0.943)


def test_an_interval_has_a_width_where_every_task_is_right() -> None:
    # n / (n + z²)
    estimate = mean_over_tasks([1.0] * 10, num_rollouts=4)
    assert (estimate.value, estimate.high) == (1.0, pytest.approx(1.0))
    assert estimate.low == pytest.approx(10 / (10 + 1.959964**2))


def test_rollouts_of_one_task_that_agree_make_no_interval_narrower() -> None:
    shares = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    assert mean_over_tasks(shares, num_rollouts=64) == mean_over_tasks(shares, num_rollouts=1)


def test_a_mean_that_is_no_share_has_the_normal_interval() -> None:
    # squares of 2, 0, 0 and 2: the variance is 8/3, of four tasks
    estimate = mean_over_tasks([-1.0, 1.0, 1.0, 3.0], num_rollouts=2)
    half = 1.959963984540054 * (8 / 3 / 4) ** 0.5
    assert estimate == Estimate(1.0, pytest.approx(1 - half), pytest.approx(1 + half))


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.3, 0.6), (8.0, 0.5)])
def test_intervals_hold_the_true_value_19_times_out_of_20(alpha: float, beta: float, k: int) -> None:
    """Of 600 evaluations with 8 rollouts of 60 tasks, whose chances of success have a beta distribution."""
    rng, num_tasks, num_rollouts, times = np.random.default_rng(3), 60, 8, 600
    # 1 - E[(1 - p)^k]
    truth = 1 - np.prod([(beta + each) / (alpha + beta + each) for each in range(k)])
    chances = rng.beta(alpha, beta, (times, num_tasks))
    by_right = np.array([pass_at_k(num_rollouts, right, k) for right in range(num_rollouts + 1)])
    held = 0
    for right in rng.binomial(num_rollouts, chances):
        estimate = mean_over_tasks(list(by_right[right]), num_rollouts=num_rollouts)
        held += estimate.low <= truth <= estimate.high
    assert 0.925 <= held / times <= 0.99
