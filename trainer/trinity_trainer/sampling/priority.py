"""How much a rollout is worth to the next batch.

The highest numbers are trained first; NaN is not trained again. `versions` are the model versions
that made the rollouts, `uses` how often each was trained.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from trinity_data.config import ReplayBufferConfig

Numbers = npt.NDArray[np.float64]
Priority = Callable[[Numbers, Numbers, np.random.Generator], Numbers]


def linear_decay(versions: Numbers, uses: Numbers, draw: np.random.Generator, *, decay: float) -> Numbers:
    """version − decay · uses."""
    del draw
    return versions - decay * uses


def decay_limit_randomization(
    versions: Numbers,
    uses: Numbers,
    draw: np.random.Generator,
    *,
    decay: float,
    use_count_limit: int,
    sigma: float,
) -> Numbers:
    """version − decay · uses + sigma · N(0, 1); at most `use_count_limit` uses, 0 being no limit."""
    noise = sigma * draw.standard_normal(len(versions))
    return _limited(versions - decay * uses + noise, uses, use_count_limit)


def uniform(versions: Numbers, uses: Numbers, draw: np.random.Generator, *, use_count_limit: int) -> Numbers:
    """Every rollout alike."""
    return _limited(draw.random(len(versions)), uses, use_count_limit)


def build_priority(config: ReplayBufferConfig) -> Priority:
    """The function that the pipeline file names, with its arguments."""
    args = config.priority_fn_args
    if config.priority_fn == "linear_decay":
        return partial(linear_decay, decay=args.decay)
    if config.priority_fn == "uniform":
        return partial(uniform, use_count_limit=args.use_count_limit)
    return partial(
        decay_limit_randomization,
        decay=args.decay,
        use_count_limit=args.use_count_limit,
        sigma=args.sigma,
    )


def _limited(priorities: Numbers, uses: Numbers, limit: int) -> Numbers:
    return np.where(uses >= limit, np.nan, priorities) if limit else priorities
