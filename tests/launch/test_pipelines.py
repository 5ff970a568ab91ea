"""The order of a stage's experience operators, with the algorithm's advantage among them."""

from __future__ import annotations

import pytest

from tests.operators.test_prepare_and_metrics import experiences
from trinity_data.launch.pipelines import in_order
from trinity_operators.advantages import GrpoAdvantage, ReinforceAdvantage
from trinity_operators.base import Operator
from trinity_operators.experience_pipeline import ExperiencePipeline
from trinity_operators.filters import MaskResponseTruncated, RewardFilter, TruncatedResponseFilter


def advantages(operators: list[Operator]) -> dict[str, float | None]:
    """Of three rollouts with rewards 3, 0, 0, of which the last is cut: those that are kept."""
    rows = experiences([3.0, 0.0, 0.0])
    place = rows.schema.get_field_index("truncated")
    rows = rows.set_column(place, rows.schema.field(place), [["", "", "response"]])
    outcomes = ExperiencePipeline(operators, "s").apply(rows)["outcomes"]
    return {row["experience_id"][-6:]: row["advantage"] for row in outcomes.to_pylist() if row["kept"]}


def test_the_advantage_comes_last_but_for_operators_behind_it() -> None:
    mask, filtered, advantage = MaskResponseTruncated(), RewardFilter(), GrpoAdvantage()
    assert in_order([mask, filtered], [advantage]) == [filtered, advantage, mask]


def test_an_advantage_among_the_operators_takes_the_place_of_the_algorithms() -> None:
    own, filtered = ReinforceAdvantage(), RewardFilter()
    assert in_order([own, filtered], [GrpoAdvantage()]) == [own, filtered]


def test_a_masked_rollout_counts_in_the_mean_of_its_group_and_a_dropped_one_does_not() -> None:
    plain = [GrpoAdvantage(epsilon=0.0)]
    # mean 1, deviation √3
    masked = advantages(in_order([MaskResponseTruncated()], plain))
    assert masked == pytest.approx({"000/00": 2 / 3**0.5, "001/00": -1 / 3**0.5})
    # mean 1.5, deviation 1.5 √2
    dropped = advantages(in_order([TruncatedResponseFilter()], plain))
    assert dropped == pytest.approx({"000/00": 1 / 2**0.5, "001/00": -1 / 2**0.5})
