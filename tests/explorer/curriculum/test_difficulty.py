"""The BOTS rule against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trinity_data.config.selection import SelectorArgs
from trinity_explorer.curriculum.difficulty import DifficultySelector, PassRates, StepRates, nearest
from trinity_explorer.curriculum.selectors import Request

FEATURES = np.array([[0.2, 0.6], [0.0, 0.4], [0.5, 1.0], [0.1, 0.1]])


def step(places: list[int], rates: list[float]) -> StepRates:
    return StepRates(np.array(places), np.array(rates))


def test_a_step_updates_explored_tasks_by_their_rollouts_and_the_others_by_interpolation() -> None:
    rates = PassRates(FEATURES, SelectorArgs(m=10, lamb=0.5, rho=0.2))
    rates.update(step([0, 1], [0.5, 0.3]))
    # weak 0.1, strong 0.5, observed 0.4: three quarters of the way
    np.testing.assert_allclose(rates.capability, 0.75)
    # 0.5·1 + 0.5 + 10·rate; of the others 0.2·10·(weak + 0.75·(strong − weak))
    np.testing.assert_allclose(rates.alpha_N, [6.0, 4.0, 1 + 2 * 0.875, 1 + 2 * 0.1])
    np.testing.assert_allclose(rates.beta_N, [6.0, 8.0, 1 + 2 * 0.125, 1 + 2 * 0.9])
    np.testing.assert_allclose(rates.expected()[:2], [0.5, 1 / 3])


def test_the_capability_is_a_running_mean_and_stays_where_the_models_do_not_differ() -> None:
    rates = PassRates(FEATURES, SelectorArgs())
    rates.update(step([0, 1], [0.5, 0.3]))
    rates.update(step([2], [0.5]))
    np.testing.assert_allclose(rates.capability, 0.9 * 0.75)
    rates.update(step([3], [1.0]))
    np.testing.assert_allclose(rates.capability, 0.9 * 0.75)


def test_adaptive_rho_is_halved_after_a_step_that_was_predicted_badly() -> None:
    rates = PassRates(FEATURES, SelectorArgs(adaptive_rho=True))
    rates.update(step([0, 1], [0.5, 0.3]))
    assert rates.rho == 0.2
    rates.update(step([3], [1.0]))
    assert rates.rho == 0.1


def test_the_default_target_is_half_and_not_the_easiest_tasks() -> None:
    features = np.linspace(0, 1, 101)[:, None] * np.ones(2)

    def explored(first: int, end: int) -> Iterator[StepRates]:
        yield step(list(range(0, 101, 10)), [number / 100 for number in range(0, 101, 10)])

    args = SelectorArgs(m=200, rho=1.0, do_sample=False)
    found = DifficultySelector(features, args, explored, first_step=1, seed=0).choose(Request(2, 5))
    assert sorted(found.tolist()) == [48, 49, 50, 51, 52]
    easiest = DifficultySelector(
        features, args.model_copy(update={"target_reward": 1.0}), explored, first_step=1, seed=0
    ).choose(Request(2, 5))
    assert min(easiest) >= 96


def test_a_selector_that_begins_late_chooses_as_one_that_was_there_from_the_start() -> None:
    rates = {number: step([number % 4], [number / 10]) for number in range(1, 10)}

    def explored(first: int, end: int) -> Iterator[StepRates]:
        yield from (rates[number] for number in range(first, end))

    def selector(tau: float) -> DifficultySelector:
        return DifficultySelector(FEATURES, SelectorArgs(tau=tau), explored, first_step=1, seed=5)

    for tau in (0.0, 0.3):
        whole = selector(tau)
        steps = [whole.choose(Request(number, 2)).tolist() for number in range(1, 10)]
        for number in range(1, 10):
            assert selector(tau).choose(Request(number, 2)).tolist() == steps[number - 1]


def test_a_high_temperature_takes_tasks_that_are_far_from_the_target_too() -> None:
    features = np.zeros((100, 2))
    args = SelectorArgs(tau=100.0)
    selector = DifficultySelector(features, args, lambda first, end: iter(()), first_step=1, seed=0)
    assert len({place for number in range(1, 60) for place in selector.choose(Request(number, 8))}) > 90


def test_the_nearest_leave_out_what_the_step_has_as_long_as_there_are_others() -> None:
    distance = np.array([0.0, 0.1, 0.2, 0.3])
    assert nearest(distance, 2, chosen=np.array([0, 1])).tolist() == [2, 3]
    assert nearest(distance, 3, chosen=np.array([0, 1])).tolist() == [2, 3, 0]
    assert nearest(distance, 6, chosen=np.empty(0, np.int64)).tolist() == [0, 1, 2, 3, 0, 1]
