"""Operators are prepared once and closed once, and the numbers that they report are those of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest

from trinity_data.errors import OperatorError
from trinity_data.schema import experience_id, group_id, rows_to_table
from trinity_operators.base import Filter, FilterResult, Mapper, MapperResult, Operator
from trinity_operators.counts import counts_table
from trinity_operators.experience_pipeline import ExperiencePipeline
from trinity_operators.preparation import prepared
from trinity_operators.runner import run_operators


def experiences(rewards: Sequence[float], *, step: int = 1, position: int = 0) -> pa.Table:
    """A group of them."""
    name = group_id("explorer", "s", step, position)
    return rows_to_table(
        "experiences",
        [
            {"experience_id": experience_id(name, i), "group_id": name, "step": step, "reward": reward,
             "rollout": i, "turn": 0, "error": "", "info": "{}"}
            for i, reward in enumerate(rewards)
        ],
    )  # fmt: skip


class Scorer(Mapper):
    """Reports the mean reward and the requests it took."""

    reads = ("reward",)
    writes = ("echo",)

    def __init__(self, name: str = "Scorer", log: list[str] | None = None, fails: bool = False) -> None:
        self.name, self.log, self.fails = name, [] if log is None else log, fails

    def prepare(self) -> None:
        if self.fails:
            raise ConnectionError("no route")
        self.log.append(f"prepare {self.name}")

    def close(self) -> None:
        self.log.append(f"close {self.name}")

    def map(self, rows: pa.Table) -> MapperResult:
        rewards = np.asarray(rows["reward"].to_numpy(), dtype=np.float64)
        return MapperResult(
            {"echo": rewards},
            metrics={"mean": float(rewards.mean()), "nothing": float("nan")},
            totals={"requests": rows.num_rows},
        )


class Half(Filter):
    def apply(self, rows: pa.Table) -> FilterResult:
        keep = np.arange(rows.num_rows) % 2 == 0
        return FilterResult(keep, "odd", metrics={"share": 0.5}, totals={"dropped": int((~keep).sum())})


def test_numbers_of_a_step_are_means_over_its_rows_and_sums_over_its_calls() -> None:
    pipeline = ExperiencePipeline([Scorer(), Half()], stage="s")
    pipeline.apply(experiences([1.0, 1.0, 1.0], step=1))
    pipeline.apply(experiences([0.0], step=1, position=1))
    (judge, half) = pipeline.counts_table(1).to_pylist()
    assert judge["metrics"] == [("mean", 0.75), ("requests", 4.0)]
    assert half["metrics"] == [("dropped", 1.0), ("share", 0.5)]


def test_a_metric_that_is_no_number_is_refused_with_the_operators_name() -> None:
    class Talker(Mapper):
        def map(self, rows: pa.Table) -> MapperResult:
            return MapperResult({}, metrics={"mood": "good"})  # type: ignore[dict-item]

    with pytest.raises(OperatorError, match=r"'Talker': metric 'mood' must be a number, found 'good'"):
        run([Talker()])


def test_operators_are_prepared_in_order_and_closed_from_the_last_to_the_first() -> None:
    log: list[str] = []
    pipeline = ExperiencePipeline([Scorer("a", log), Scorer("b", log)], stage="s")
    pipeline.apply(experiences([1.0], step=1))
    pipeline.apply(experiences([1.0], step=2))
    assert log == ["prepare a", "prepare b"]
    pipeline.close()
    pipeline.close()
    assert log[2:] == ["close b", "close a"]


def test_an_operator_that_cannot_be_prepared_is_named_and_those_before_are_closed() -> None:
    log, watched = list[str](), list[str]()
    operators = [Scorer("a", log), Scorer("b", log, fails=True)]
    wording = r"operators\[1\]: 'b' cannot be prepared: ConnectionError: no route"
    with pytest.raises(OperatorError, match=wording), prepared(operators, watched.append):
        raise AssertionError("not reached")
    assert log == ["prepare a", "close a"]
    assert watched == ["operators[0]: 'a', in prepare", "operators[1]: 'b', in prepare"]


def test_an_operator_without_numbers_has_an_empty_map() -> None:
    assert run([Plain()]) == [[]]


class Plain(Mapper):
    writes = ("one",)

    def map(self, rows: pa.Table) -> dict[str, list[float]]:
        return {"one": [1.0] * rows.num_rows}


def run(operators: Sequence[Operator]) -> list[object]:
    result = run_operators(
        operators,
        experiences([1.0, 0.0]),
        row_kind="experience",
        id_column="experience_id",
        stage="s",
        step=1,
    )
    return counts_table(result.counts, pipeline="experience", stage="s", step=1)["metrics"].to_pylist()
