"""Functions as operators: over a table or over one row, with arguments that are checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pydantic import BaseModel, Field

import trinity_data
from trinity_data import RowAnswer
from trinity_data.errors import OperatorError
from trinity_operators.base import Filter, FilterResult, Mapper, MapperResult, Operator, OperatorSpecError
from trinity_operators.counts import Metric
from trinity_operators.functions import declaration_of
from trinity_operators.registry import build_operator
from trinity_operators.result import Result
from trinity_operators.runner import run_operators

HERE = Path(__file__).parent


@trinity_data.filter(reads=("words", "metrics"))
def enough(row: Mapping[str, Any], least: int = 2, key: str = "accuracy") -> bool:
    return bool(row["words"] >= least) and "reward" not in row and row["metrics"].get(key, 1.0) > 0


@trinity_data.filter(reads=("words",), reason="too long", pure=False, num_cpus=2)
def short(rows: pa.Table, most: int = 3) -> pa.ChunkedArray:
    return pc.less_equal(rows["words"], most)


@trinity_data.filter(reads=("words",))
def named(rows: pa.Table) -> FilterResult:
    return FilterResult(np.array([True, False, True]), "even", metrics={"kept": 2.0})


@trinity_data.mapper(reads=("reward", "words"), writes=("reward", "bonus"))
def bonus(row: Mapping[str, Any], each: float = 0.5) -> dict[str, float]:
    return {"reward": row["reward"] + each * row["words"], "bonus": each * row["words"]}


@trinity_data.mapper(reads=("reward",), writes=("reward",))
def halved(row: Mapping[str, Any]) -> float | None:
    return None if row["reward"] is None else row["reward"] / 2


@trinity_data.mapper(reads=("reward",), writes=("reward",))
def doubled(rows: pa.Table) -> pa.ChunkedArray:
    return pc.multiply(rows["reward"], 2.0)


@trinity_data.mapper(reads=("reward",), writes=("echo",))
def echoed(rows: pa.Table) -> MapperResult:
    return MapperResult({"echo": rows["reward"]}, totals={"rows": rows.num_rows})


@trinity_data.filter()
def wordy(row: Mapping[str, Any]) -> str:
    return "yes"


@trinity_data.mapper(writes=("a", "b"))
def partial_row(row: Mapping[str, Any]) -> dict[str, float]:
    return {"a": 1.0}


@trinity_data.filter(reads=("words",), reason="odd")
def even(row: Mapping[str, Any]) -> bool | RowAnswer:
    is_even = row["words"] % 2 == 0
    return RowAnswer(is_even, f"{row['words']} is odd", {"looked_up": 1}) if row["words"] > 1 else is_even


@trinity_data.mapper(reads=("words",), writes=("half",))
def half(row: Mapping[str, Any]) -> RowAnswer:
    return RowAnswer(row["words"] / 2, f"half of {row['words']}", {"tokens": row["words"]})


def undecorated(row: Mapping[str, Any]) -> bool:
    return True


def table() -> pa.Table:
    return pa.table(
        {
            "task_id": ["t0", "t1", "t2"],
            "words": [1, 3, 5],
            "reward": pa.array([1.0, 2.0, None], pa.float64()),
            "metrics": pa.array([[], [], [("accuracy", 0.0)]], pa.map_(pa.string(), pa.float64())),
        }
    )


def built(name: str, **args: Any) -> Operator:
    return build_operator(f"./test_functions.py:{name}", args, base_dir=HERE)


def run(name: str, **args: Any) -> Result:
    return run_operators(
        [built(name, **args)], table(), row_kind="experience", id_column="task_id", stage="s", step=1
    )


def test_a_filter_over_one_row_sees_the_columns_it_reads_with_maps_as_dicts() -> None:
    result = run("enough", least=3)
    assert result.kept.tolist() == [False, True, False]
    assert result.decisions["reason"].to_pylist()[0] == "enough(least=3, key='accuracy') is false"


def test_a_filter_over_a_table_may_return_arrow_booleans_or_a_result() -> None:
    assert run("short").dropped_by.to_pylist() == ["", "", "short"]
    assert run("short", most=1).decisions["reason"].to_pylist() == ["", "too long", "too long"]
    result = run("named")
    assert result.kept.tolist() == [True, False, True]
    assert result.counts[0].metrics["kept"].value == 2.0


def test_a_mapper_over_one_row_returns_its_columns_or_the_only_one() -> None:
    rows = table().slice(0, 2)
    result = run_operators(
        [built("bonus", each=2)], rows, row_kind="experience", id_column="task_id", stage="s", step=1
    )
    assert result.survivors["reward"].to_pylist() == [3.0, 8.0]
    assert result.survivors["bonus"].to_pylist() == [2.0, 6.0]
    assert run("halved").survivors["reward"].to_pylist() == [0.5, 1.0, None]


def test_a_function_of_one_row_may_give_its_reason_and_what_it_cost() -> None:
    result = run("even")
    assert result.decisions["reason"].to_pylist() == ["odd", "3 is odd", "5 is odd"]
    assert result.counts[0].metrics == {"looked_up": Metric(2.0, 0)}
    result = run("half")
    assert result.survivors["half"].to_pylist() == [0.5, 1.5, 2.5]
    assert result.decisions["reason"].to_pylist() == ["half of 1", "half of 3", "half of 5"]
    assert result.counts[0].metrics == {"tokens": Metric(9.0, 0)}


def test_a_mapper_over_a_table_returns_a_column_or_a_result() -> None:
    assert run("doubled").survivors["reward"].to_pylist() == [2.0, 4.0, None]
    result = run("echoed")
    assert (result.counts[0].metrics["rows"].value, result.score_names) == (3.0, ["echo"])


def test_what_the_decorator_declares_is_the_operators() -> None:
    operator = built("short")
    assert (operator.label, operator.reads, operator.pure, operator.num_cpus) == (
        "short",
        ("words",),
        False,
        2,
    )
    assert isinstance(operator, Filter) and isinstance(built("bonus"), Mapper)
    assert halved({"reward": 3.0}) == 1.5 and declaration_of(halved) is not None


@pytest.mark.parametrize(
    ("name", "args", "wording"),
    [
        ("enough", {"leest": 3}, r"unknown argument 'leest'; known: key, least .did you mean 'least'"),
        ("enough", {"least": "3"}, "least: found '3'; Input should be a valid integer"),
        ("enough", {"row": 1}, "unknown argument 'row'"),
        ("undecorated", {}, "or a function under @trinity_data.filter or @trinity_data.mapper"),
    ],
)
def test_bad_arguments_of_a_function_are_refused_before_anything_runs(
    name: str, args: dict[str, Any], wording: str
) -> None:
    with pytest.raises(OperatorSpecError, match=wording):
        built(name, **args)


@pytest.mark.parametrize(
    ("name", "wording"),
    [
        ("wordy", "'wordy' returned 'yes'; a filter returns True or False for each row"),
        ("partial_row", "'partial_row' returned 'a' for a row; it declares a, b"),
    ],
)
def test_a_result_of_the_wrong_kind_names_the_function(name: str, wording: str) -> None:
    with pytest.raises(OperatorError, match=wording):
        run(name)


def test_a_decorator_refuses_what_it_cannot_call() -> None:
    with pytest.raises(OperatorError, match="'f' takes 'task' first; call it `rows` to get a table"):

        @trinity_data.filter()
        def f(task: object) -> bool:
            return True

    with pytest.raises(
        OperatorError, match=r"reads is the text 'prompt'; write the names as a tuple: \('prompt',\)"
    ):
        trinity_data.filter(reads="prompt")  # type: ignore[arg-type]
    with pytest.raises(OperatorError, match=r"unknown declaration 'num_cpu'.*did you mean 'num_cpus'"):
        trinity_data.filter(num_cpu=1)  # type: ignore[call-arg]


class Bounds(BaseModel):
    low: Annotated[float, Field(ge=0)] = 0.0
    high: float


class Between(Filter):
    reads = ("words",)

    class Args(BaseModel):
        low: Annotated[float, Field(ge=0)] = 0.0
        high: float

    def __init__(self, args: Args) -> None:
        self.args = args

    def apply(self, rows: pa.Table) -> FilterResult:
        words = rows["words"].to_numpy()
        return FilterResult((words >= self.args.low) & (words <= self.args.high), "outside")


@trinity_data.filter(reads=("words",))
def between(row: Mapping[str, Any], args: Bounds) -> bool:
    return bool(args.low <= row["words"] <= args.high)


@pytest.mark.parametrize("name", ["Between", "between"])
def test_arguments_may_be_a_pydantic_model(name: str) -> None:
    assert run(name, low=2, high=4).kept.tolist() == [False, True, False]
    with pytest.raises(OperatorSpecError, match=r"low: found -1; Input should be greater than or equal to 0"):
        built(name, low=-1, high=4)
    with pytest.raises(
        OperatorSpecError, match=r"unknown argument 'hig'; known: high, low .did you mean 'high'"
    ):
        built(name, hig=4)
    with pytest.raises(OperatorSpecError, match="argument 'high' is missing; its arguments: high, low"):
        built(name)
