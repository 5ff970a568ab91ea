"""How far the numbers of a step are from those of the steps before.

N numbers now in G groups, M before in H groups, B bins.
"""

from __future__ import annotations

import numpy as np

from trinity_operators.base import Floats

_DECILES = np.linspace(0.1, 0.9, 9)
_LEAST_SHARE = 1e-3


def standardized_difference(now_N: Floats, before_M: Floats) -> float:
    """The difference of the means in pooled standard deviations (Cohen's d; Cohen 1988, section 2.2).

    Infinite where neither varies and the means differ.
    """
    difference = float(now_N.mean() - before_M.mean())
    squares = float(np.sum((now_N - now_N.mean()) ** 2) + np.sum((before_M - before_M.mean()) ** 2))
    degrees = len(now_N) + len(before_M) - 2
    if difference == 0.0:
        return 0.0
    if squares == 0.0 or degrees < 1:
        return float(np.copysign(np.inf, difference))
    return difference / float(np.sqrt(squares / degrees))


def standard_errors_apart(means_G: Floats, means_before_H: Floats) -> float:
    """Student's t of the means of groups, because rollouts of one group are alike; 0 of fewer than three."""
    if len(means_G) + len(means_before_H) < 3:
        return 0.0
    distance = standardized_difference(means_G, means_before_H)
    return distance / float(np.sqrt(1 / len(means_G) + 1 / len(means_before_H)))


def population_stability_index(now_N: Floats, before_M: Floats) -> float:
    """Σ (p − q) ln(p / q) over bins between the deciles of `before`, and at them: 0 where both are alike.

    Siddiqi 2006, Credit Risk Scorecards, chapter 6: up to 0.1 little has changed, above 0.25 much. An empty
    bin counts as a share of 0.001. Chance alone gives about (B − 1)(1/N + 1/M) (Yurdakul 2018).
    """
    edges = np.unique(np.quantile(before_M, _DECILES))
    now_B, before_B = (_shares(numbers, edges) for numbers in (now_N, before_M))
    return float(np.sum((now_B - before_B) * np.log(now_B / before_B)))


def _shares(numbers: Floats, edges: Floats) -> Floats:
    """Even bins lie between edges; odd ones are the edges, because rewards have few values."""
    bins = np.searchsorted(edges, numbers, side="left") + np.searchsorted(edges, numbers, side="right")
    return np.maximum(np.bincount(bins, minlength=2 * len(edges) + 1) / len(numbers), _LEAST_SHARE)


MEASURES = {
    "standardized_difference": standardized_difference,
    "psi": population_stability_index,
}
