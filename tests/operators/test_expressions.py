"""SQL expressions over columns: what they compute, and what is refused before anything runs."""

from __future__ import annotations

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from trinity_data.errors import OperatorError
from trinity_operators.expressions import Expression, ExpressionFilter, ExpressionMapper
from trinity_operators.runner import run_operators


def rows() -> pa.Table:
    metrics = [[("accuracy", 1.0)], [], [("accuracy", 0.5)]]
    return pa.table(
        {
            "experience_id": ["e0", "e1", "e2"],
            "reward": pa.array([1.0, 0.25, None], pa.float64()),
            "response_length": pa.array([100, 200, 300], pa.int32()),
            "truncated": ["", "response", None],
            "metrics": pa.array(metrics, pa.map_(pa.string(), pa.float64())),
            "logprobs": [[-1.0], [-1.0, -2.0], []],
        }
    )


EXPRESSIONS = [
    "reward - 0.1 * response_length / 1000",
    "case when truncated = 'response' then 0 when reward > 0.5 then 2 else reward end",
    "coalesce(metrics['accuracy'], -1)",
    "response_length % 150 + 2 ** 3 ^ 2",
    "reward / 0",
    "len(logprobs) + length(truncated)",
    "least(reward, 0.5) + greatest(response_length, 150) - abs(-3)",
    "round(ln(response_length)) + sqrt(4) + floor(2.7) + ceil(2.1)",
    "truncated like 're%'",
    "starts_with(truncated, 'resp') or contains(truncated, 'zzz')",
    "response_length in (100, 200) and reward is not null",
    "response_length not in (100)",
    "response_length between 150 and 300",
    "not reward > 0.5 or truncated <> ''",
    "-reward",
    "3",
]


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_an_expression_has_the_values_that_duckdb_computes(text: str) -> None:
    with duckdb.connect() as database:
        database.register("rows", rows())
        expected = [value for (value,) in database.sql(f"select {text} from rows").fetchall()]
    assert Expression.parse(text)(rows()).to_pylist() == pytest.approx(expected)


def test_an_expression_names_the_columns_that_it_reads() -> None:
    text = "reward + metrics['accuracy'] * response_length - reward"
    assert Expression.parse(text).columns == ("reward", "metrics", "response_length")


def test_a_mapper_writes_the_value_and_a_filter_keeps_where_it_is_true() -> None:
    penalty = ExpressionMapper("reward - 0.001 * response_length")
    assert (penalty.reads, penalty.writes) == (("reward", "response_length"), ("reward",))
    score = ExpressionMapper("response_length / 100", column="hundreds")
    short = ExpressionFilter("reward > 0.1")
    result = run_operators(
        [penalty, score, short], rows(), row_kind="experience", id_column="experience_id", stage="s", step=1
    )
    np.testing.assert_allclose(result.values["reward"], [0.9, 0.05, np.nan])
    assert result.values["hundreds"].tolist() == [1.0, 2.0, 3.0]
    assert result.kept.tolist() == [True, False, False]
    assert result.decisions["reason"].to_pylist()[-2:] == ["not reward > 0.1", "not reward > 0.1"]


@pytest.mark.parametrize(
    ("text", "wording"),
    [
        ("reward -", "'reward -' is no SQL expression: syntax error"),
        ("reward, 1", "write one value, without from, where and order"),
        ("reward from experiences", "write one value, without from, where and order"),
        ("reward order by 1", "write one value, without from, where and order"),
        ("(select 1)", "subquery is not offered; allowed are columns, numbers"),
        ("avg(reward) over ()", "window is not offered"),
        ("rond(reward)", r"unknown function 'rond'; known: .*did you mean 'round'"),
        ("read_text('/etc/passwd')", "unknown function 'read_text'"),
        ("abs(reward, 1)", "cannot be computed: abs takes 1 positional"),
        ("reward + truncated", "cannot be computed: Function 'add' has no kernel matching"),
        ("contains(response_text, truncated)", "contains without a text in quotes is not offered"),
    ],
)
def test_what_is_no_expression_over_columns_is_refused_when_it_is_built(text: str, wording: str) -> None:
    with pytest.raises(OperatorError, match=wording):
        ExpressionMapper(text)


def test_a_metric_that_no_row_has_is_taken_for_a_misspelling() -> None:
    with pytest.raises(
        OperatorError, match=r"unknown entry of metrics 'acuracy'; known: accuracy .did you mean"
    ):
        ExpressionMapper("reward + metrics['acuracy']").map(rows())


def test_a_condition_that_is_a_number_is_refused() -> None:
    with pytest.raises(OperatorError, match="'reward' is double; a condition is true or false"):
        ExpressionFilter("reward").apply(rows())
