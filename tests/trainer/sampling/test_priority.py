from __future__ import annotations

import numpy as np
import pytest

from trinity_data.config import PriorityArgs, ReplayBufferConfig
from trinity_trainer.sampling.priority import Numbers, build_priority

VERSIONS, USES = np.array([5.0, 5.0, 4.0, 4.0]), np.array([0.0, 1.0, 0.0, 3.0])


def priorities(name: str, seed: int = 0, **args: float) -> Numbers:
    config = ReplayBufferConfig.model_validate({"priority_fn": name, "priority_fn_args": args})
    return build_priority(config)(VERSIONS, USES, np.random.default_rng(seed))


def test_a_use_costs_as_many_versions_as_the_decay_says() -> None:
    assert priorities("linear_decay").tolist() == [5.0, 3.0, 4.0, -2.0]
    assert priorities("linear_decay", decay=0.5).tolist() == [5.0, 4.5, 4.0, 2.5]


def test_a_row_that_reached_its_limit_is_not_trained_again() -> None:
    limited = priorities("decay_limit_randomization")
    assert limited[:3].tolist() == [5.0, 3.0, 4.0] and np.isnan(limited[3])
    assert not np.isnan(priorities("decay_limit_randomization", use_count_limit=0)).any()
    assert np.isnan(priorities("uniform", use_count_limit=1)).tolist() == [False, True, False, True]


def test_the_noise_has_the_spread_that_was_asked_for() -> None:
    args = PriorityArgs(sigma=2.0, decay=0.0, use_count_limit=0)
    config = ReplayBufferConfig(priority_fn="decay_limit_randomization", priority_fn_args=args)
    many = build_priority(config)(np.zeros(20_000), np.zeros(20_000), np.random.default_rng(1))
    assert many.mean() == pytest.approx(0.0, abs=0.05) and many.std() == pytest.approx(2.0, rel=0.02)


def test_uniform_replay_draws_every_row_alike_and_by_the_seed() -> None:
    config = ReplayBufferConfig(priority_fn="uniform", priority_fn_args=PriorityArgs(use_count_limit=0))
    uniform = build_priority(config)
    first = [int(np.argmax(uniform(VERSIONS, USES, np.random.default_rng(seed)))) for seed in range(4_000)]
    assert np.bincount(first, minlength=4) == pytest.approx([1_000] * 4, rel=0.1)
    assert (priorities("uniform", 3, use_count_limit=0) == priorities("uniform", 3, use_count_limit=0)).all()
