"""Names that registries above the configuration know, and the names that both must have."""

from __future__ import annotations

from trinity_data.config import ALGORITHM_TYPES
from trinity_data.config.algorithm import ADVANTAGE_FNS, ENTROPY_LOSS_FNS, KL_FNS, POLICY_LOSS_FNS
from trinity_operators.registry import ADVANTAGES
from trinity_trainer.algorithms.registry import ALGORITHMS


def test_algorithms_are_those_of_the_trainer() -> None:
    assert set(ALGORITHM_TYPES) == set(ALGORITHMS)
    for name, method in ALGORITHM_TYPES.items():
        assert method.needs_group == (
            ALGORITHMS[name].min_repeat_times > 1 and not ALGORITHMS[name].pairwise
        ), name


def test_functions_are_those_of_the_registries() -> None:
    assert set(ADVANTAGE_FNS) == set(ADVANTAGES)
    for algorithm in ALGORITHMS.values():
        assert algorithm.policy_loss_fn in POLICY_LOSS_FNS
        assert algorithm.kl_loss_fn in KL_FNS
        assert algorithm.entropy_loss_fn in ENTROPY_LOSS_FNS
