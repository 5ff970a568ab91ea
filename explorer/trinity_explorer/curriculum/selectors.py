"""Which tasks a step gets.

A choice follows from the seed, the step, the pool and what the ledger holds of earlier steps;
a selector keeps nothing that cannot be made again from these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from trinity_explorer.curriculum.pool import Floats, Places


@dataclass(frozen=True)
class Request:
    """Tasks that a step asks for."""

    step: int
    count: int
    refill: int = 0
    """0, or the round of refilling that asks."""
    num_taken: int = 0
    """How many tasks of the pool steps have got before."""
    chosen: Places = field(default_factory=lambda: np.empty(0, np.int64))
    """What the step has got already."""

    def random(self, seed: int) -> np.random.Generator:
        """Random numbers of this request alone."""
        return np.random.default_rng([seed, self.step, self.refill])


class Selector(Protocol):
    def choose(self, request: Request) -> Places:
        """`request.count` places; the same for the same request and ledger."""
        ...


class RandomSelector:
    """Every task as likely as any other: none twice in a step, and each step anew."""

    def __init__(self, num_tasks: int, *, seed: int) -> None:
        self.num_tasks, self.seed = num_tasks, seed

    def choose(self, request: Request) -> Places:
        weights = np.ones(self.num_tasks)
        return draw(weights, request.count, request.random(self.seed), chosen=request.chosen)


class EasyToHardSelector:
    """Tasks in the order of their features, the highest first; later keys decide between equals.

    After the last task the order begins again.
    """

    def __init__(self, features: Floats) -> None:
        # lexsort takes the last key as the first, and keeps the order of equals
        self.order: Places = np.lexsort(-features.T[::-1]).astype(np.int64)

    def choose(self, request: Request) -> Places:
        numbers = request.num_taken + np.arange(request.count)
        return self.order[numbers % len(self.order)]


class WeightSelector:
    """Tasks by weights that are asked for again every `every` steps, counted from `first_step`."""

    def __init__(
        self, weights_at: Callable[[int], Floats], *, first_step: int, every: int, seed: int
    ) -> None:
        """`weights_at` gives the weights as the ledger has them before a step."""
        self.weights_at, self.first_step, self.every, self.seed = weights_at, first_step, every, seed
        self._asked_at, self._weights = -1, np.empty(0)

    def choose(self, request: Request) -> Places:
        asked_at = request.step - (request.step - self.first_step) % self.every
        if asked_at != self._asked_at:
            self._asked_at, self._weights = asked_at, self.weights_at(asked_at)
        return draw(self._weights, request.count, request.random(self.seed), chosen=request.chosen)


def draw(weights: Floats, count: int, random: np.random.Generator, *, chosen: Places | None = None) -> Places:
    """`count` places without replacement, one after another by weight; those of `chosen` only
    where there are no others, and each again only where all that have a weight are drawn.

    Places in the order of E/w, E exponential: Efraimidis and Spirakis, 2006.
    """
    parts = list[Places]()
    if chosen is not None and len(chosen):
        weights = weights.copy()
        others, weights[chosen] = weights[chosen], 0.0
        if not np.any(weights > 0):
            weights[chosen] = others
    while count > 0:
        alive = np.flatnonzero(weights > 0)
        if not len(alive):
            raise ValueError("no weight is above 0")
        keys = random.standard_exponential(len(alive)) / weights[alive]
        parts.append(alive[smallest(keys, min(count, len(alive)))])
        count -= len(parts[-1])
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def smallest(keys: Floats, count: int) -> Places:
    """The places of the `count` smallest keys in their order; of equals the first ones."""
    if count <= 0:
        return np.empty(0, np.int64)
    bound = np.partition(keys, count - 1)[count - 1]
    below, equal = np.flatnonzero(keys < bound), np.flatnonzero(keys == bound)
    found = np.concatenate([below, equal[: count - len(below)]])
    return found[np.lexsort((found, keys[found]))]
