"""The runner: which rows are kept, what is recorded, and the error of a broken operator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from trinity_data.errors import OperatorError
from trinity_data.schema import DECISIONS, OPERATORS, OUTCOMES
from trinity_operators.base import (
    Column,
    Filter,
    FilterResult,
    Mapper,
    Operator,
    float_column,
    group_codes,
)
from trinity_operators.checks import check_columns
from trinity_operators.counts import counts_table
from trinity_operators.result import Result, outcomes_table, scores_column
from trinity_operators.runner import run_operators


class AtLeast(Filter):
    name = "at_least"
    reads = ("reward",)

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def apply(self, rows: pa.Table) -> FilterResult:
        rewards = float_column(rows, "reward")
        return FilterResult(rewards >= self.threshold, "too small", rewards)


class Double(Mapper):
    name = "double"
    version = "2"
    reads = ("reward",)
    writes = ("reward", "half")

    def map(self, rows: pa.Table) -> Mapping[str, Column]:
        rewards = float_column(rows, "reward")
        return {"reward": rewards * 2, "half": rewards / 2}


class Answer(Operator):
    """Returns whatever it is given, as a filter or mapper would."""


class Says(Filter):
    def __init__(self, result: FilterResult) -> None:
        self.result = result

    def apply(self, rows: pa.Table) -> FilterResult:
        return self.result


class Writes(Mapper):
    def __init__(self, columns: Mapping[str, Any], declared: tuple[str, ...] | None = None) -> None:
        self.columns = columns
        self.writes = tuple(columns) if declared is None else declared

    def map(self, rows: pa.Table) -> Mapping[str, Column]:
        return self.columns


class Broken(Mapper):
    def map(self, rows: pa.Table) -> Mapping[str, Column]:
        raise KeyError("colour")


class GroupBest(Filter):
    """Keeps the best of each group."""

    reads = ("group_id", "reward")
    whole_groups = True

    def apply(self, rows: pa.Table) -> FilterResult:
        codes, num_groups = group_codes(rows)
        best = np.full(num_groups, -np.inf)
        np.maximum.at(best, codes, float_column(rows, "reward"))
        return FilterResult(float_column(rows, "reward") == best[codes], "not the best of its group")


def experiences(rewards: list[float | None], groups: list[str] | None = None) -> pa.Table:
    ids = [f"e{i}" for i in range(len(rewards))]
    return pa.table(
        {
            "experience_id": ids,
            "group_id": groups or ["g"] * len(rewards),
            "reward": pa.array(rewards, pa.float64()),
            "response_text": [f"text {i}" for i in ids],
            "step": pa.array([3] * len(rewards), pa.int64()),
        }
    )


def run(rows: pa.Table, *operators: Operator) -> Result:
    return run_operators(
        operators, rows, row_kind="experience", id_column="experience_id", stage="grpo", step=3
    )


def test_survivors_carry_what_mappers_wrote() -> None:
    result = run(experiences([1.0, 2.0, 3.0]), AtLeast(2.0), Double())
    assert result.survivors.select(["experience_id", "reward", "half"]).to_pydict() == {
        "experience_id": ["e1", "e2"],
        "reward": [4.0, 6.0],
        "half": [1.0, 1.5],
    }


def test_every_operator_leaves_a_decision_without_endy_row_it_saw() -> None:
    decisions = run(experiences([1.0, 2.0, 3.0]), AtLeast(2.0), Double()).decisions
    assert decisions.schema == DECISIONS
    seen = decisions.select(
        ["operator", "position", "version", "row_id", "kept", "reason", "value_before", "value_after"]
    )
    assert [tuple(row.values()) for row in seen.to_pylist()] == [
        ("at_least", 0, "1", "e0", False, "too small", 1.0, 1.0),
        ("at_least", 0, "1", "e1", True, "", 2.0, 2.0),
        ("at_least", 0, "1", "e2", True, "", 3.0, 3.0),
        ("double", 1, "2", "e1", True, "", 2.0, 4.0),
        ("double", 1, "2", "e2", True, "", 3.0, 6.0),
    ]
    assert set(decisions["row_kind"].to_pylist()) == {"experience"}
    assert set(decisions["stage"].to_pylist()) == {"grpo"}
    assert set(decisions["step"].to_pylist()) == {3}


def test_a_dropped_row_keeps_the_values_it_had_then() -> None:
    result = run(experiences([1.0, 2.0, 3.0]), AtLeast(2.0), Double(), AtLeast(5.0))
    assert result.kept.tolist() == [False, False, True]
    assert result.dropped_by.to_pylist() == ["at_least", "at_least", ""]
    assert result.values["reward"].tolist() == [1.0, 4.0, 6.0]
    np.testing.assert_array_equal(result.values["half"], [np.nan, 1.0, 1.5])
    assert result.score_names == ["half"]


def test_the_rows_that_were_given_stay_as_they_were() -> None:
    rows = experiences([1.0, 2.0, 3.0])
    before = pa.Table.from_pylist(rows.to_pylist(), schema=rows.schema)
    run(rows, Double(), AtLeast(3.0), Double())
    assert rows.equals(before)


def test_the_time_of_an_operator_is_shared_by_its_rows() -> None:
    result = run(experiences([1.0, 2.0, 3.0]), AtLeast(2.0), Double())
    for count in result.counts:
        mine = result.decisions.filter(pc.equal(result.decisions["position"], count.position))
        assert sum(mine["microseconds"].to_pylist()) == pytest.approx(count.microseconds)
        assert count.microseconds > 0


def test_an_operator_is_not_called_when_nothing_is_left() -> None:
    result = run(experiences([1.0, 2.0]), AtLeast(9.0), Broken())
    assert [(c.operator, c.rows_in, c.rows_out) for c in result.counts] == [
        ("at_least", 2, 0),
        ("Broken", 0, 0),
    ]
    assert result.survivors.num_rows == 0
    assert result.decisions.num_rows == 2


def test_no_rows_and_no_operators_are_fine() -> None:
    assert run(experiences([]), AtLeast(1.0)).decisions.num_rows == 0
    untouched = run(experiences([1.0]))
    assert untouched.kept.tolist() == [True]
    assert untouched.values["reward"].tolist() == [1.0]


def test_counts_become_rows_of_the_operators_table() -> None:
    result = run(experiences([1.0, 2.0]), AtLeast(2.0), Double())
    table = counts_table(result.counts, pipeline="experience", stage="grpo", step=3)
    assert table.schema == OPERATORS
    assert [(r["operator"], r["position"], r["rows_in"], r["rows_out"]) for r in table.to_pylist()] == [
        ("at_least", 0, 2, 1),
        ("double", 1, 1, 1),
    ]


def test_decisions_of_an_operator_that_writes_the_reward_have_it_before_and_after() -> None:
    class Second(Mapper):
        """Writes the reward behind another column."""

        writes = ("half", "reward")

        def map(self, rows: pa.Table) -> dict[str, Column]:
            rewards = float_column(rows, "reward")
            return {"half": rewards / 2, "reward": rewards + 0.25}

    decisions = run(experiences([1.0, None, 3.0]), Second(), AtLeast(2.0)).decisions
    columns = ("operator", "value_before", "value_after", "reward_before", "reward_after")
    assert [tuple(row.values()) for row in decisions.select(columns).to_pylist()][::2] == [
        ("Second", None, 0.5, 1.0, 1.25),
        ("Second", None, 1.5, 3.0, 3.25),
        ("at_least", None, None, None, None),
    ]
    assert decisions["reward_after"].to_pylist() == [1.25, None, 3.25, None, None, None]


def test_outcomes_hold_the_shaped_reward_of_every_row() -> None:
    rows = experiences([1.0, 2.0])
    outcomes = outcomes_table(run(rows, AtLeast(2.0), Double()), rows, stage="grpo", step=3)
    assert outcomes.schema == OUTCOMES
    assert outcomes.to_pylist() == [
        {
            "experience_id": "e0",
            "group_id": "g",
            "stage": "grpo",
            "step": 3,
            "reward": 1.0,
            "advantage": None,
            "token_rewards": None,
            "token_advantages": None,
            "scores": [],
            "kept": False,
            "dropped_by": "at_least",
        },
        {
            "experience_id": "e1",
            "group_id": "g",
            "stage": "grpo",
            "step": 3,
            "reward": 4.0,
            "advantage": None,
            "token_rewards": None,
            "token_advantages": None,
            "scores": [("half", 1.0)],
            "kept": True,
            "dropped_by": "",
        },
    ]


def test_a_score_that_a_row_never_got_is_left_out_of_its_map() -> None:
    result = run(experiences([1.0, 2.0, 3.0]), Double(), AtLeast(3.0), Writes({"late": [7.0, 8.0]}))
    assert scores_column(result).to_pylist() == [
        [("half", 0.5)],
        [("half", 1.0), ("late", 7.0)],
        [("half", 1.5), ("late", 8.0)],
    ]
    assert scores_column(result, result.kept).to_pylist() == [
        [("half", 1.0), ("late", 7.0)],
        [("half", 1.5), ("late", 8.0)],
    ]


def test_scores_without_any_score_are_empty_maps() -> None:
    assert scores_column(run(experiences([1.0, 2.0]))).to_pylist() == [[], []]


def test_a_missing_reward_is_null_in_the_record() -> None:
    result = run(experiences([None, 2.0]), Double())
    assert result.decisions["value_before"].to_pylist() == [None, 2.0]
    assert result.survivors["reward"].to_pylist() == [None, 4.0]


def test_a_reason_may_differ_from_row_to_row_and_kept_rows_have_none() -> None:
    result = FilterResult(np.array([False, True, False]), ["first", "second", "third"])
    assert run(experiences([1, 2, 3]), Says(result)).decisions["reason"].to_pylist() == ["first", "", "third"]


def test_a_filter_may_keep_scores_of_dropped_rows_too() -> None:
    class Scored(Filter):
        writes = ("size",)

        def apply(self, rows: pa.Table) -> FilterResult:
            return FilterResult(np.array([False, True]), "small", scores={"size": [1, 2]})

    result = run(experiences([1.0, 2.0]), Scored())
    assert result.values["size"].tolist() == [1.0, 2.0]
    assert result.survivors["size"].to_pylist() == [2.0]


def test_a_text_column_is_replaced_and_recorded_by_its_length() -> None:
    result = run(experiences([1.0, 2.0]), Writes({"response_text": ["four", None]}))
    assert result.survivors["response_text"].to_pylist() == ["four", None]
    assert result.decisions["value_before"].to_pylist() == [7.0, 7.0]
    assert result.decisions["value_after"].to_pylist() == [4.0, None]
    assert result.score_names == []


def test_a_replaced_column_keeps_its_type() -> None:
    rows = experiences([1.0]).append_column("speed", pa.array([1.5], pa.float32()))
    assert run(rows, Writes({"speed": [2.5]})).survivors.schema.field("speed").type == pa.float32()


def test_several_groups_at_once_give_what_they_give_one_by_one() -> None:
    rng = np.random.default_rng(0)
    groups = [f"g{i // 4}" for i in range(32)]
    rows = experiences(rng.normal(size=32).tolist(), groups)
    together = run(rows, GroupBest(), Double())
    results = [run(rows.slice(start, 4), GroupBest(), Double()) for start in range(0, 32, 4)]
    assert together.kept.tolist() == [kept for result in results for kept in result.kept.tolist()]
    assert together.survivors.equals(pa.concat_tables([result.survivors for result in results]))
    assert int(together.kept.sum()) == 8


def test_chunks_of_the_table_make_no_difference() -> None:
    rows = experiences([1.0, 2.0, 3.0, 4.0])
    pieces = pa.concat_tables([rows.slice(0, 1), rows.slice(1, 3)])
    one_chunk, chunked = run(rows, AtLeast(2.0), Double()), run(pieces, AtLeast(2.0), Double())
    assert chunked.survivors.equals(one_chunk.survivors)
    assert chunked.decisions.drop_columns("microseconds").equals(
        one_chunk.decisions.drop_columns("microseconds")
    )


def test_a_large_table_is_recorded_like_a_small_one() -> None:
    rows = experiences([float(i % 2) for i in range(3000)])
    result = run(rows, AtLeast(1.0))
    assert result.decisions["reason"].to_pylist() == ["too small", ""] * 1500
    assert result.dropped_by.to_pylist() == ["at_least", ""] * 1500


@pytest.mark.parametrize(
    ("operator", "message"),
    [
        (Says(FilterResult(np.array([True]), "")), "'Says' returned 1 values of 'keep' for 2 rows"),
        (Says(FilterResult(np.array([1, 0]), "")), "'Says': keep must hold booleans, found int64"),
        (Says(FilterResult(np.array([True, False]), ["one"])), "returned 1 values of 'reason' for 2 rows"),
        (Says(FilterResult(np.array([True, True]), "", [1.0])), "returned 1 values of 'value' for 2 rows"),
        (Writes({"score": [1.0]}), "'Writes' returned 1 values of 'score' for 2 rows"),
        (Writes({"score": ["a", "b"]}), "'Writes': 'score' must hold floats, found string"),
        (Writes({"score": [[1.0], [2.0]]}), "'score' must hold floats, found list"),
        (Writes({"score": np.zeros((2, 2))}), "'score' must hold floats, found float64 of 2 dimensions"),
        (Writes({"response_text": [1.0, 2.0]}), "'response_text' must hold text, found double"),
        (Writes({"step": [1.0, 2.0]}), "writes 'step', a column of int64; only floats and text change"),
        (Writes({"experience_id": ["a", "b"]}), "writes 'experience_id', which no operator may change"),
        (Writes({"a": [1.0, 2.0]}, ("b",)), "declares that it writes b, but returned a"),
        (Writes({"a": [1.0, 2.0]}, ()), "declares that it writes nothing, but returned a"),
        (Broken(), "'Broken' failed on 2 rows: KeyError: 'colour'"),
        (Answer(), "'Answer' is neither a Filter nor a Mapper"),
    ],
)
def test_a_broken_contract_is_reported_with_the_operators_name(operator: Operator, message: str) -> None:
    with pytest.raises(OperatorError) as caught:
        run(experiences([1.0, 2.0]), AtLeast(0.0), operator)
    assert str(caught.value).startswith("operators[1]: ")
    assert message in str(caught.value)


def test_what_an_operator_raised_stays_the_cause() -> None:
    with pytest.raises(OperatorError) as caught:
        run(experiences([1.0]), Broken())
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_column_that_is_not_there_is_named_with_the_nearest() -> None:
    class Reads(AtLeast):
        reads = ("rewrad",)

    with pytest.raises(OperatorError, match=r"'Reads' reads column 'rewrad'.*did you mean 'reward'"):
        run(experiences([1.0]), Reads(1.0))


def test_columns_are_checked_before_anything_runs() -> None:
    class ReadsHalf(AtLeast):
        reads = ("half",)

    check_columns([Double(), ReadsHalf(1.0)], ["reward"])
    with pytest.raises(OperatorError, match=r"operators\[0\]: 'ReadsHalf' reads column 'half'"):
        check_columns([ReadsHalf(1.0), Double()], ["reward"])


def test_columns_cannot_be_checked_after_an_operator_that_may_write_more() -> None:
    class Stats(AtLeast):
        writes_more = True

    class ReadsScore(AtLeast):
        reads = ("llm_quality_score",)

    check_columns([Stats(0.0), ReadsScore(1.0)], ["reward"])
