from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_trainer.microbatch import plan_micro_batches


def test_rows_of_like_length_go_together() -> None:
    plan = plan_micro_batches([10, 50, 12, 48], token_budget=100, world_size=1)
    assert plan == [[[0, 2], [3, 1]]]


def test_a_row_above_the_budget_goes_alone() -> None:
    assert plan_micro_batches([5, 500, 5], token_budget=100, world_size=1) == [[[0, 2], [1]]]


def test_a_batch_that_fits_into_one_is_halved_for_two_ranks() -> None:
    assert plan_micro_batches([5, 5, 5, 5], token_budget=1000, world_size=2) == [[[0, 1]], [[2, 3]]]


def test_a_rank_without_rows_gets_an_empty_micro_batch() -> None:
    assert plan_micro_batches([5], token_budget=1000, world_size=3) == [[[0]], [[]], [[]]]
    assert plan_micro_batches([], token_budget=10, world_size=2) == [[], []]


def test_a_pair_is_as_expensive_as_its_longer_row() -> None:
    plan = plan_micro_batches([10, 40, 12, 12], token_budget=79, world_size=1, rows_together=2)
    assert plan == [[[2, 3], [0, 1]]]


def test_without_a_budget_micro_batches_have_a_fixed_number_of_rows() -> None:
    plan = plan_micro_batches([5, 500, 6, 7, 8], token_budget=None, max_rows=2, world_size=1)
    assert plan == [[[0, 2], [3, 4], [1]]]
    pairs = plan_micro_batches(
        [5, 5, 6, 6, 7, 7], token_budget=None, max_rows=4, world_size=1, rows_together=2
    )
    assert pairs == [[[0, 1, 2, 3], [4, 5]]]


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), max_size=60),
    budget=st.integers(1, 1000),
    world_size=st.integers(1, 8),
    rows_together=st.sampled_from([1, 2]),
)
def test_every_plan_keeps_its_promises(
    lengths: list[int], budget: int, world_size: int, rows_together: int
) -> None:
    lengths = lengths[: len(lengths) // rows_together * rows_together]
    plan = plan_micro_batches(
        lengths, token_budget=budget, world_size=world_size, rows_together=rows_together
    )
    micro_batches = [rows for rank in plan for rows in rank]
    assert len(plan) == world_size
    assert len({len(rank) for rank in plan}) == 1
    assert sorted(row for rows in micro_batches for row in rows) == list(range(len(lengths)))
    for rows in micro_batches:
        cost = len(rows) * max((lengths[row] for row in rows), default=0)
        assert cost <= budget or len(rows) == rows_together
        for first in range(0, len(rows), rows_together):
            unit = rows[first : first + rows_together]
            assert unit[0] % rows_together == 0
            assert unit == list(range(unit[0], unit[0] + rows_together))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_no_rank_idles_while_another_has_rows_to_share(world_size: int) -> None:
    plan = plan_micro_batches([7] * 16, token_budget=10_000, world_size=world_size)
    assert all(sum(map(len, rank)) == 16 // world_size for rank in plan)
