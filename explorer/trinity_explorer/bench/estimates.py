"""pass@k, maj@k and the confidence interval of a mean over tasks.

Each is exact for the rollouts that are there: the mean over every choice of k of the n rollouts of
a task, so that nothing is drawn at random and the same rows give the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

Z_95 = 1.959963984540054
"""Two-sided 95 % of the normal distribution."""
Counts = np.ndarray[tuple[int, int], np.dtype[np.float64]]


@dataclass(frozen=True)
class Estimate:
    """A mean over tasks, and its 95 % confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, order=True)
class Votes:
    """The rollouts of a task that gave one answer."""

    number: int
    share_right: float
    """1 or 0 unless the reward takes equal answers for different ones."""


def powers_up_to(number: int) -> tuple[int, ...]:
    """1, 2, 4, …, and `number`."""
    return tuple(sorted({2**power for power in range(number.bit_length())} | {number}))


def pass_at_k(num_rollouts: int, num_right: int, k: int) -> float:
    """The chance that one of k rollouts is right, of n of which c are: 1 − C(n − c, k) / C(n, k).

    Chen et al., Evaluating Large Language Models Trained on Code (arXiv:2107.03374), equation 1.
    """
    # of whole numbers, so that no product of n factors is rounded
    return 1 - math.comb(num_rollouts - num_right, k) / math.comb(num_rollouts, k)


@lru_cache(maxsize=4096)
def majority_at(votes: tuple[Votes, ...], abstained: int, ks: tuple[int, ...]) -> tuple[float, ...]:
    """For each k the chance that the most frequent answer of k rollouts is right; of several that are
    equally frequent each is as likely to be taken.

    `abstained` rollouts gave no answer: they may be among the k and have no vote. k without a vote are wrong.
    """
    num_rollouts, largest = sum(each.number for each in votes) + abstained, max(ks)
    chances = dict.fromkeys(ks, 0.0)
    for place, winner in enumerate(votes):
        if not winner.share_right:
            continue
        others = [each.number for each in (*votes[:place], *votes[place + 1 :])]
        for won in range(1, min(winner.number, largest) + 1):
            ways = _ways(others, abstained, most=won, largest=largest - won)
            # of `ties` others that are as frequent
            shares = ways @ (1 / np.arange(1, ways.shape[1] + 1))
            for k in ks:
                if k >= won:
                    drawn = winner.share_right * math.comb(winner.number, won) * float(shares[k - won])
                    chances[k] += drawn / math.comb(num_rollouts, k)
    return tuple(chances[k] for k in ks)


def _ways(others: Sequence[int], abstained: int, *, most: int, largest: int) -> Counts:
    """In how many ways 0 to `largest` rollouts can be drawn, by their number and by how many of the `others`
    have `most` of them; none may have more.
    """
    num_ties = min(len(others), largest // most)
    ways = np.zeros((largest + 1, num_ties + 1))
    for taken in range(min(abstained, largest) + 1):
        ways[taken, 0] = math.comb(abstained, taken)
    for number in others:
        drawn = ways.copy()
        for taken in range(1, min(number, most, largest) + 1):
            weight, before = float(math.comb(number, taken)), ways[: largest + 1 - taken]
            if taken == most:
                drawn[taken:, 1:] += weight * before[:, :-1]
            else:
                drawn[taken:] += weight * before
        ways = drawn
    return ways


def mean_over_tasks(values: Sequence[float], *, num_rollouts: int) -> Estimate:
    """The mean of one number for each task, with Wilson's interval.

    Rollouts of one task depend on each other, so that tasks are the sample (clustered standard errors,
    Miller, arXiv:2411.00640). Their variance s² says how many independent rollouts they are worth:
    p (1 − p) / (s² / tasks), no fewer than there are tasks and no more than there are rollouts. Wilson's
    interval for so many stays between 0 and 1, and has a width where every task is right (Brown, Cai and
    DasGupta 2001; Korn and Graubard 1998 for samples in clusters).
    """
    sample = np.asarray(values, dtype=np.float64)
    mean, num_tasks = float(sample.mean()), len(sample)
    error = float(sample.var(ddof=1)) / num_tasks if num_tasks > 1 else 0.0
    if sample.min() < 0 or sample.max() > 1:
        # no share: the normal approximation
        half = Z_95 * math.sqrt(error)
        return Estimate(mean, mean - half, mean + half)
    worth = mean * (1 - mean) / error if error else 0.0
    size = min(max(worth, num_tasks), num_tasks * num_rollouts)
    centre = (mean + Z_95**2 / (2 * size)) / (1 + Z_95**2 / size)
    half = Z_95 / (1 + Z_95**2 / size) * math.sqrt(mean * (1 - mean) / size + Z_95**2 / (4 * size**2))
    return Estimate(mean, max(0.0, centre - half), min(1.0, centre + half))
