"""What each selector chooses, by hand-computed orders and by frequencies."""

from __future__ import annotations

import numpy as np
import pytest

from trinity_explorer.curriculum.selectors import (
    EasyToHardSelector,
    RandomSelector,
    Request,
    WeightSelector,
    draw,
    smallest,
)


def test_smallest_gives_the_first_of_equals_in_order() -> None:
    keys = np.array([3.0, 1.0, 2.0, 1.0, 2.0, 0.5])
    assert smallest(keys, 4).tolist() == [5, 1, 3, 2]
    assert smallest(keys, 0).tolist() == []
    assert smallest(keys, 6).tolist() == [5, 1, 3, 2, 4, 0]


def test_a_draw_has_no_place_twice_and_none_without_weight() -> None:
    weights = np.array([0.0, 1.0, 2.0, 0.0, 3.0])
    for number in range(50):
        assert sorted(draw(weights, 3, np.random.default_rng(number)).tolist()) == [1, 2, 4]


def test_the_first_of_a_draw_comes_as_often_as_its_weight_says() -> None:
    weights, random = np.array([1.0, 2.0, 7.0]), np.random.default_rng(0)
    first = np.array([draw(weights, 1, random)[0] for _ in range(4000)])
    # a standard deviation is 0.008
    np.testing.assert_allclose(np.bincount(first) / 4000, [0.1, 0.2, 0.7], atol=0.03)


def test_after_all_that_have_a_weight_a_draw_begins_again() -> None:
    found = draw(np.array([1.0, 0.0, 1.0]), 5, np.random.default_rng(0)).tolist()
    assert sorted(found[:2]) == sorted(found[2:4]) == [0, 2]
    assert found[4] in (0, 2)


def test_what_a_step_has_already_is_drawn_only_where_there_is_nothing_else() -> None:
    weights, chosen = np.array([1.0, 1.0, 1e-9]), np.array([0, 1])
    assert draw(weights, 1, np.random.default_rng(0), chosen=chosen).tolist() == [2]
    weights[2] = 0.0
    assert sorted(draw(weights, 2, np.random.default_rng(0), chosen=chosen).tolist()) == [0, 1]


def test_a_draw_without_any_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="no weight is above 0"):
        draw(np.zeros(3), 1, np.random.default_rng(0))


def test_random_steps_differ_and_each_is_the_same_again() -> None:
    selector = RandomSelector(100, seed=3)
    steps = [selector.choose(Request(step, 8)).tolist() for step in range(1, 5)]
    assert all(len(set(step)) == 8 for step in steps)
    assert len({tuple(step) for step in steps}) == 4
    assert RandomSelector(100, seed=3).choose(Request(4, 8)).tolist() == steps[3]
    assert RandomSelector(100, seed=4).choose(Request(4, 8)).tolist() != steps[3]
    refill = selector.choose(Request(4, 8, refill=1, chosen=np.array(steps[3])))
    assert not set(refill.tolist()) & set(steps[3])


def test_easy_to_hard_goes_by_the_first_key_then_by_the_second_then_by_the_place() -> None:
    features = np.array([[0.5, 1.0], [0.9, 0.0], [0.5, 2.0], [0.1, 9.0], [0.9, 0.0]])
    selector = EasyToHardSelector(features)
    assert selector.order.tolist() == [1, 4, 2, 0, 3]
    assert selector.choose(Request(1, 2, num_taken=0)).tolist() == [1, 4]
    # goes on where the steps before ended, and begins again after the last
    assert selector.choose(Request(9, 3, num_taken=3)).tolist() == [0, 3, 1]


def test_weights_are_asked_for_every_so_many_steps_and_after_a_restart_as_of_then() -> None:
    asked: list[int] = []

    def weights_at(step: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        asked.append(step)
        return np.where(np.arange(20) % 20 >= step, 1.0, 0.0)

    def selector() -> WeightSelector:
        return WeightSelector(weights_at, first_step=3, every=4, seed=1)

    whole = selector()
    steps = {step: whole.choose(Request(step, 3)).tolist() for step in range(3, 12)}
    assert asked == [3, 7, 11]
    assert min(min(steps[step]) for step in range(7, 11)) >= 7
    assert selector().choose(Request(9, 3)).tolist() == steps[9]
    assert asked[-1] == 7
