"""BOTS: a Beta distribution over each task's pass rate, and tasks whose pass rate is near a target.

Bayesian Online Task Selection, arXiv 2510.26374. The distributions follow from the stored rewards alone:
after a restart they are computed again, step by step in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from trinity_data.config.selection import SelectorArgs
from trinity_explorer.curriculum.pool import Floats, Places
from trinity_explorer.curriculum.selectors import Request, draw, smallest

# of the running mean of the capability, as in the code that was published with the paper
_CAPABILITY_DECAY = 0.9
# reference models that differ less on a step's tasks say nothing about where the policy is between them
_LEAST_DIFFERENCE = 0.01
_LARGE_ERROR = 0.25


class StepRates(NamedTuple):
    """What a step found out: the pass rate of each task it explored."""

    places: Places
    rates: Floats
    """From 0 to 1."""


class PassRates:
    """Beta(α, β) for each task."""

    def __init__(self, features_N2: Floats, args: SelectorArgs) -> None:
        """`features_N2`: pass rates of a weaker and a stronger reference model."""
        self.weak_N, self.strong_N, self.args = features_N2[:, 0], features_N2[:, 1], args
        self.alpha_N, self.beta_N = np.ones(len(features_N2)), np.ones(len(features_N2))
        self.capability: float | None = None
        """Where the policy is between the weaker (0) and the stronger model (1)."""
        self.rho = args.rho

    def update(self, step: StepRates) -> None:
        """α ← (1−λ)α + λ + (1−ρ)s + ρs̃, and β with failures for successes.

        s: successes among `m` rollouts of the tasks that the step explored. s̃: the same for every task,
        as the capability would have it; of those explored, s itself.
        """
        lamb, m = self.args.lamb, self.args.m
        predicted_N = self._predict(step)
        error = float(np.mean(np.abs(predicted_N[step.places] - step.rates)))
        if self.args.adaptive_rho and error >= _LARGE_ERROR:
            self.rho /= 2
        rho_N = np.full(len(predicted_N), self.rho)
        predicted_N[step.places], rho_N[step.places] = step.rates, 1.0
        self.alpha_N = (1 - lamb) * self.alpha_N + lamb + rho_N * m * predicted_N
        self.beta_N = (1 - lamb) * self.beta_N + lamb + rho_N * m * (1 - predicted_N)

    def expected(self) -> Floats:
        return self.alpha_N / (self.alpha_N + self.beta_N)

    def _predict(self, step: StepRates) -> Floats:
        """Pass rates between those of the two models, by the capability."""
        weak, strong = self.weak_N[step.places].mean(), self.strong_N[step.places].mean()
        if abs(strong - weak) >= _LEAST_DIFFERENCE:
            found = float((step.rates.mean() - weak) / (strong - weak))
            before = found if self.capability is None else self.capability
            self.capability = _CAPABILITY_DECAY * before + (1 - _CAPABILITY_DECAY) * found
        capability = 0.5 if self.capability is None else self.capability
        return np.clip(self.weak_N + capability * (self.strong_N - self.weak_N), 0.0, 1.0)


class DifficultySelector:
    """Tasks whose pass rate, drawn from its distribution or expected, is nearest to the target."""

    def __init__(
        self,
        features_N2: Floats,
        args: SelectorArgs,
        explored: Callable[[int, int], Iterator[StepRates]],
        *,
        first_step: int,
        seed: int,
    ) -> None:
        """`explored(first, end)` gives the rates of those steps, in their order."""
        self.rates, self.args, self.explored, self.seed = PassRates(features_N2, args), args, explored, seed
        self.next_step = first_step

    def choose(self, request: Request) -> Places:
        for step in self.explored(self.next_step, request.step):
            self.rates.update(step)
        self.next_step = request.step
        random = request.random(self.seed)
        if self.args.do_sample:
            found = random.beta(self.rates.alpha_N, self.rates.beta_N)
        else:
            found = self.rates.expected()
        distance = np.abs(found - self.args.target_reward)
        if self.args.tau > 0:
            weights = np.exp(-distance / self.args.tau)
            return draw(weights, request.count, random, chosen=request.chosen)
        return nearest(distance, request.count, chosen=request.chosen)


def nearest(distance: Floats, count: int, *, chosen: Places) -> Places:
    """The places with the smallest distances, those of `chosen` last; from the start again after all."""
    ranked = distance.copy()
    ranked[chosen] += np.inf
    first = smallest(ranked, min(count, len(ranked)))
    return np.resize(first, count)
