"""Operators that keep state go on after a resume as if nothing had happened, or are refused."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from trinity_data.errors import OperatorError
from trinity_operators.base import Filter, FilterResult, Mapper
from trinity_operators.filters import ExactDuplicateFilter
from trinity_operators.runner import run_operators
from trinity_operators.state_replay import replay_state, stateful_part


class Prefix(Mapper):
    reads = writes = ("prompt",)

    def map(self, rows: pa.Table) -> dict[str, list[str]]:
        return {"prompt": [text[:1] for text in rows["prompt"].to_pylist()]}


class EverySecond(Filter):
    """Keeps every second row that it has ever seen."""

    keeps_state = True
    reads = ("prompt",)

    def __init__(self) -> None:
        self.seen = 0

    def apply(self, rows: pa.Table) -> FilterResult:
        numbers = range(self.seen, self.seen + rows.num_rows)
        self.seen += rows.num_rows
        return FilterResult(np.array([n % 2 == 0 for n in numbers]), "odd")


def rows(*prompts: str) -> pa.Table:
    return pa.table({"task_id": [f"t{n}" for n in range(len(prompts))], "prompt": list(prompts)})


def dropped_by(operators: list[Filter | Mapper], table: pa.Table) -> list[str]:
    result = run_operators(operators, table, row_kind="task", id_column="task_id", stage="s", step=None)
    return [str(label) for label in result.dropped_by.to_pylist()]


def pipeline() -> list[Filter | Mapper]:
    return [Prefix(), ExactDuplicateFilter(), EverySecond(), ExactDuplicateFilter(columns=["task_id"])]


def test_what_was_seen_is_what_the_operators_before_left() -> None:
    first, second = rows("ax", "ay", "bx", "cx", "dx"), rows("az", "ex", "fx", "dy")
    undisturbed = pipeline()
    before, after = dropped_by(undisturbed, first), dropped_by(undisturbed, second)
    assert before == ["", "exact_duplicate_filter", "EverySecond", "", "EverySecond"]
    resumed = pipeline()
    replay_state(resumed, first, before, row_kind="task", stage="s")
    assert dropped_by(resumed, second) == after
    assert [len(stateful_part(part)) for part in (resumed, resumed[:1], [EverySecond(), Prefix()])] == [
        4,
        0,
        1,
    ]


def test_an_operator_that_answers_otherwise_the_second_time_is_refused() -> None:
    class Moody(EverySecond):
        calls = 0

        def apply(self, rows: pa.Table) -> FilterResult:
            Moody.calls += 1
            self.seen = Moody.calls
            return super().apply(rows)

    first = rows("a", "b")
    before = dropped_by([Moody()], first)
    with pytest.raises(
        OperatorError, match="task 't0' was dropped by 'Moody' when it was read and is kept now"
    ):
        replay_state([Moody()], first, before, row_kind="task", stage="s")


def test_a_row_that_a_later_operator_dropped_need_only_pass() -> None:
    replay_state([EverySecond(), Prefix(), Filter_()], rows("a"), ["Filter_"], row_kind="task", stage="s")


class Filter_(Filter):
    def apply(self, rows: pa.Table) -> FilterResult:
        raise AssertionError("keeps no state, and is not shown anything")
