"""Batches by priority, with replay: what a rollout is worth, and which come again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

from trinity_data.config import ExperienceBufferConfig, PriorityArgs, ReplayBufferConfig
from trinity_data.query.audit import audit
from trinity_data.schema import group_of
from trinity_data.store.store import Store
from trinity_trainer.sampling.priority import PrioritySelection, build_priority

if TYPE_CHECKING:
    from conftest import Put

START_OF_TIME = "2026-01-01T00:00:00+00:00"
Train = Callable[[int, list[str]], None]


def by_priority(
    store: Store,
    name: str = "linear_decay",
    *,
    at: float = 0.0,
    cooldown: float | None = None,
    num_used: int = 100,
    whole_groups: bool = False,
    max_staleness: int | None = None,
    seed: int = 7,
    args: Mapping[str, Any] | None = None,
) -> PrioritySelection:
    """At `at` seconds after the start of time; a decay of 2 where the function takes one."""
    replay = ReplayBufferConfig(
        enable=True,
        priority_fn=name,
        priority_fn_args=PriorityArgs(**(args or {})),
        reuse_cooldown_time=cooldown,
    )
    buffer = ExperienceBufferConfig(capacity=num_used, whole_groups=whole_groups, replay_buffer=replay)
    now = datetime.fromisoformat(START_OF_TIME) + timedelta(seconds=at)
    return PrioritySelection(store, "rl", buffer, max_staleness=max_staleness, seed=seed, now=lambda: now)


def test_replay_counts_rollouts_and_brings_all_their_turns_back(store: Store, put: Put, train: Train) -> None:
    old, new = put(1, (2,), turns=(2, 3)), put(2, (1,), turns=(2,))
    train(1, old)
    chosen = by_priority(store, at=99.0, cooldown=0.0)
    assert chosen.choose(2, through_step=2, size=2) == [*new, *old[:2]]
    assert by_priority(store, at=99.0, cooldown=0.0, num_used=1).choose(2, through_step=2, size=9) == [
        *new,
        *old[2:],
    ]


def test_every_rollout_is_drawn_alike_however_many_turns_it_has(store: Store, put: Put) -> None:
    ids = put(1, (2,), turns=(1, 40))
    first = [
        by_priority(store, "uniform", seed=seed).choose(1, through_step=1, size=1)[0] for seed in range(200)
    ]
    assert 70 < first.count(ids[0]) < 130


def test_newer_versions_take_precedence_over_older_ones(store: Store, put: Put) -> None:
    old, new = put(1), put(2)
    assert by_priority(store).choose(2, through_step=2, size=3) == [*new, old[0]]


def test_without_a_cooldown_time_nothing_is_trained_twice(store: Store, put: Put, train: Train) -> None:
    ids = put(1)
    train(1, ids)
    assert by_priority(store, at=1e9).choose(2, through_step=2, size=4) == []


def test_a_row_comes_back_after_its_cooldown_and_not_before(store: Store, put: Put, train: Train) -> None:
    first, second = put(1), put(2)
    train(1, first)  # read at second 1
    assert by_priority(store, at=10.9, cooldown=10.0).choose(2, through_step=2, size=4) == second
    again = by_priority(store, at=11.0, cooldown=10.0).choose(2, through_step=2, size=4)
    assert again == [*second, *first]
    # a fresh row of version 1 beats a used one of version 0, whose use costs 2 more
    assert by_priority(store, at=11.0, cooldown=10.0).choose(2, through_step=2, size=3) == [*second, first[0]]


def test_a_row_whose_step_a_crash_cut_short_still_rests(store: Store, put: Put) -> None:
    ids = put(1)
    store.form_batch("rl", 1, ids, replay=True)
    assert by_priority(store, at=1e9, cooldown=5.0).choose(2, through_step=2, size=4) == []


def test_uses_are_counted_over_restarts_and_end_at_the_limit(
    store: Store, put: Put, train: Train, tmp_path: Path
) -> None:
    ids = put(1)
    for step in (1, 2, 3):
        limited = by_priority(
            store, "decay_limit_randomization", at=100.0, cooldown=0.0, args={"use_count_limit": 3}
        )
        assert limited.choose(step, through_step=step, size=2) == ids
        train(step, ids)
    reopened = Store.create_or_open(store.root)
    limited = by_priority(reopened, "decay_limit_randomization", at=100.0, cooldown=0.0)
    assert limited.choose(4, through_step=4, size=2) == []
    unlimited = by_priority(reopened, at=100.0, cooldown=0.0)
    assert unlimited.choose(4, through_step=4, size=2) == ids
    reopened.close()
    assert audit(tmp_path).problems == []


def test_the_same_seed_and_store_choose_the_same_rows(store: Store, put: Put, train: Train) -> None:
    for step in (1, 2, 3):
        put(step, (4,))
    train(1, store.pending("rl", through_step=1))

    def choose(seed: int, step: int) -> list[str]:
        uniform = by_priority(store, "uniform", at=99.0, cooldown=1.0, seed=seed, args={"use_count_limit": 0})
        return uniform.choose(step, through_step=3, size=6)

    assert choose(7, 4) == choose(7, 4)
    assert choose(7, 4) != choose(8, 4) and choose(7, 4) != choose(7, 5)
    drawn = {row for step in range(4, 40) for row in choose(7, step)}
    assert len(drawn) == 12  # fresh and used rows alike


def test_a_group_comes_whole_and_as_its_best_row_is_worth(store: Store, put: Put, train: Train) -> None:
    first, second = put(1, (2, 2)), put(2, (2,))
    train(1, first[:1])
    chosen = by_priority(store, at=99.0, cooldown=0.0, whole_groups=True)
    # the first group's used row is worth -2, its other one 0: like the second group, and older
    assert chosen.choose(2, through_step=2, size=4) == [*second, first[1], first[0]]
    assert [group_of(row) for row in chosen.choose(2, through_step=2, size=5)] == [
        *[group_of(second[0])] * 2,
        *[group_of(first[0])] * 2,
    ]


def test_a_used_row_that_is_too_old_stays_away(store: Store, put: Put, train: Train) -> None:
    old, new = put(1), put(4)
    train(1, old)
    choice = by_priority(store, at=99.0, cooldown=0.0, max_staleness=2)
    # step 3 trains version 2, and rows of version 0 are 2 behind; at step 4 they are 3 behind
    assert choice.choose(3, through_step=3, size=9) == old
    assert choice.choose(4, through_step=4, size=9) == new


VERSIONS, USES = np.array([5.0, 5.0, 4.0, 4.0]), np.array([0.0, 1.0, 0.0, 3.0])


def priorities(name: str, seed: int = 0, **args: float) -> npt.NDArray[np.float64]:
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
