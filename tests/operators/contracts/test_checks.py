"""Each check on rows that hold and rows that break it, by hand-counted numbers."""

from __future__ import annotations

import pytest

from tests.operators.contracts.conftest import Check, Put
from trinity_data.errors import ConfigError
from trinity_data.schema import rows_to_table
from trinity_data.store.store import Store
from trinity_data.store.types import Commit


def test_a_range_names_the_rows_outside(put: Put, check: Check) -> None:
    ids = put(1, [{"reward": 0.0}, {"reward": 1.5}, {"reward": 1.0}, {"reward": -2.0}])
    found = check(check="range", column="reward", min=0, max=1)
    assert (found.measured.value, list(found.measured.rows)) == (2.0, [ids[1], ids[3]])
    assert found.message == (
        f"contract 'c' is broken: 2 of 4 rows have reward outside 0 to 1, such as {ids[1]} with 1.5"
    )
    assert not check(check="range", column="reward", max=1.5, min=-2).measured.is_broken


def test_columns_are_expressions_over_outcomes_and_maps_too(put: Put, check: Check) -> None:
    put(1, [{"reward": 3.0, "metrics": {"accuracy": 1.0}}] * 2)
    for column, value in (
        ("advantage", 0.5), ("shaped_reward", 3.0), ("scores['quality']", 0.25), ("metrics['accuracy']", 1.0),
        ("reward / response_length", 1.5),
    ):  # fmt: skip
        assert not check(check="range", column=column, min=value, max=value).measured.is_broken
        assert check(check="range", column=column, max=value - 0.1).measured.value == 2.0


@pytest.mark.parametrize("logprobs", [None, [-1.0, None], [float("nan"), -1.0], [-1.0, float("-inf")]])
def test_log_probs_that_are_no_numbers_are_found(put: Put, check: Check, logprobs: object) -> None:
    ids = put(1, [{}, {"logprobs": logprobs}])
    found = check(check="not_null", column="logprobs")
    assert (found.measured.value, list(found.measured.rows)) == (1.0, [ids[1]])


def test_failed_rollouts_and_other_explorers_are_not_measured(put: Put, check: Check) -> None:
    put(1, [{"reward": None, "error": "broke"}, {}])
    assert not check(check="not_null", column="reward").measured.is_broken
    assert check(step=2, check="not_null", column="reward").measured.value == 0.0


def test_a_response_repeats_another_one_of_its_group_alone(put: Put, check: Check) -> None:
    ids = put(1, [{"response_text": "a"}, {"response_text": "a"}, {"response_text": "a"}, {}])
    found = check(check="duplicates", max=0.2)
    assert (found.measured.value, list(found.measured.rows)) == (0.25, [ids[1]])
    assert not check(check="duplicates", max=0.25).measured.is_broken


def test_a_percentile_has_the_longer_rows_behind_it(put: Put, check: Check) -> None:
    ids = put(1, [{"response_length": length} for length in (10, 20, 30, 40)])
    found = check(check="percentile", column="response_length", percentile=50, max=24)
    assert (found.measured.value, list(found.measured.rows)) == (25.0, ids[2:])
    assert not check(check="percentile", column="response_length", percentile=50, max=25).measured.is_broken


def test_drift_is_against_the_steps_before_and_either_way(put: Put, check: Check) -> None:
    put(1, [{"reward": 0.0}, {"reward": 2.0}])
    put(2, [{"reward": 0.0}, {"reward": 2.0}])
    ids = put(3, [{"reward": 5.0}, {"reward": 7.0}])
    # means 6 and 1, squares 2 and 4 over 2 + 4 - 2 degrees
    expected = 5 / (6 / 4) ** 0.5
    found = check(step=3, check="drift", column="reward", steps=2, max=4)
    assert found.measured.value == pytest.approx(expected)
    assert list(found.measured.rows) == ids
    fallen = check(step=3, check="drift", column="-reward", steps=2, max=4)
    assert fallen.measured.value == pytest.approx(-expected) and fallen.measured.is_broken
    early = check(step=2, check="drift", column="reward", steps=2, max=4)
    assert early.measured.value is None and not early.measured.is_broken


def test_a_drift_that_few_groups_show_is_taken_for_chance(put: Put, check: Check) -> None:
    # the means of groups are 0, 2 and 4, then 5 and 7
    put(1, [{"reward": reward} for reward in (-1.0, 1.0, 1.0, 3.0, 3.0, 5.0)])
    put(2, [{"reward": reward} for reward in (4.0, 6.0, 6.0, 8.0)])
    # squares of the rows 22 and 8 over 6 + 4 - 2 degrees
    rows = (6 - 2) / ((22 + 8) / 8) ** 0.5
    # of the groups 8 and 2 over 3 + 2 - 2 degrees
    groups = (6 - 2) / (10 / 3 * (1 / 2 + 1 / 3)) ** 0.5
    assert (round(rows, 2), round(groups, 2)) == (2.07, 2.4)
    for errors, is_broken in ((0.0, True), (2.3, True), (2.5, False)):
        found = check(step=2, check="drift", column="reward", steps=1, max=2, standard_errors=errors).measured
        assert (found.value, found.is_broken) == (pytest.approx(rows), is_broken)
    assert "and any within 2.5 standard errors; these are 2.4" in found.what


def test_the_share_that_an_operator_kept_is_of_the_step(put: Put, check: Check, store: Store) -> None:
    ids = put(1, [{}, {}])
    counts = [
        {"stage": "rl", "step": step, "pipeline": pipeline, "operator": name, "position": 0, "rows_in": 8,
         "rows_out": kept}
        for step, pipeline, name, kept in (
            (1, "experience", "reward_filter", 2), (2, "experience", "reward_filter", 8),
            (None, "task", "length_filter", 6), (None, "task", "length_filter", 4),
        )
    ]  # fmt: skip
    store.commit(Commit(tables={"operators": rows_to_table("operators", counts)}))
    found = check(check="kept_share", operator="reward_filter", min=0.3)
    assert (found.measured.value, list(found.measured.rows)) == (0.25, ids)
    assert check(check="kept_share", operator="length_filter", max=0.5).measured.value == 0.625
    assert check(check="kept_share", operator="other", max=0.5).measured.value is None


def test_rows_of_contaminated_tasks_are_found(put: Put, check: Check, store: Store) -> None:
    ids = put(1, [{}, {}, {}, {}])
    tasks = [
        {"task_id": f"t{n}", "stage": "rl", "scores": {"contamination": 0.3 * n}, "kept": True}
        for n in range(2)
    ]
    store.commit(Commit(tables={"tasks": rows_to_table("tasks", tasks)}))
    found = check(check="contamination")
    assert (found.measured.value, list(found.measured.rows)) == (2.0, ids[2:])
    assert not check(check="contamination", max=0.3).measured.is_broken


def test_a_query_gives_a_number_or_rows_of_the_step(put: Put, check: Check) -> None:
    put(1, [{"reward": 9.0}])
    ids = put(2, [{"reward": 9.0}, {"reward": 1.0}])
    number = check(step=2, check="sql", sql="select count(*) from step_rows where reward > 5")
    assert (number.measured.value, number.measured.is_broken, list(number.measured.rows)) == (1.0, True, [])
    rows = check(step=2, check="sql", sql="select experience_id from step_rows where reward > 5")
    assert (rows.measured.value, list(rows.measured.rows)) == (1.0, ids[:1])
    share = "select avg(s.reward) / (select avg(reward) from rollouts where step = 1) from step_rows s"
    assert not check(step=2, check="sql", sql=share, min=0.5, max=0.6).measured.is_broken


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        (
            "select step, reward from step_rows",
            "gives 1 rows of step, reward; allowed are one number, or rows",
        ),
        ("select 'x'", "allowed are one number"),
        ("select rewrd from step_rows", "rewrd"),
        ("select experience_id || 'x' as experience_id from step_rows", "is no row of the step"),
    ],
)
def test_an_answer_of_another_shape_is_named_with_the_contract(
    put: Put, check: Check, sql: str, message: str
) -> None:
    put(1, [{}])
    with pytest.raises(ConfigError, match="contract 'c' cannot be checked") as error:
        check(check="sql", sql=sql)
    assert message in str(error.value)
