"""Advantages of single tokens: what is computed, written and refused, against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from trinity_data.errors import OperatorError
from trinity_data.schema import experience_id, group_id, rows_to_table
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_operators.base import Column, Filter, FilterResult, Mapper
from trinity_operators.experience_pipeline import ExperiencePipeline
from trinity_operators.token_returns import TokenReturns, discounted_returns

NAME = group_id("explorer", "rl", 1, 0)


def rows(*token_rewards: list[float] | None) -> pa.Table:
    """A group of responses of three tokens, of which the second is not trained."""
    return rows_to_table(
        "experiences",
        [
            {
                "experience_id": experience_id(NAME, rollout), "group_id": NAME, "stage": "rl", "step": 1,
                "position": 0, "rollout": rollout, "turn": 0, "reward": 1.0, "error": "", "info": "{}",
                "token_rewards": rewards, "action_mask": [True, False, True], "response_length": 3,
            }
            for rollout, rewards in enumerate(token_rewards)
        ],
    )  # fmt: skip


def test_a_return_is_what_is_still_to_come() -> None:
    rewards_RT = np.array([[1.0, 0.0, 2.0], [0.0, 4.0, 0.0]])
    np.testing.assert_array_equal(discounted_returns(rewards_RT, 0.5), [[1.5, 1, 2], [2, 4, 0]])
    np.testing.assert_array_equal(discounted_returns(rewards_RT, 1.0), [[3, 2, 2], [4, 4, 0]])


def test_token_advantages_are_the_returns_around_the_mean_of_the_group() -> None:
    table = rows([1.0, 0.0, 2.0], [0.0, 4.0, 0.0], None)
    table = table.append_column("advantage", pa.array([1.0, -1.0, 0.5]))
    # trained tokens: 3, 2 and 4, 0, mean 2.25
    columns = TokenReturns(weight=2.0).map(table)
    lists: Any = columns["token_advantages"]
    assert lists.to_pylist() == [[2.5, 0.5, 0.5], [2.5, 2.5, -5.5], None]


class Ramp(Mapper):
    """Writes the number of each token."""

    writes = ("token_advantages",)

    def map(self, rows: pa.Table) -> Mapping[str, Column]:
        return {"token_advantages": [[1.0, 2.0, 3.0]] * rows.num_rows}


class First(Filter):
    def apply(self, rows: pa.Table) -> FilterResult:
        return FilterResult(np.arange(rows.num_rows) == 0, "not the first")


def test_outcomes_have_what_was_written_also_of_rows_that_were_dropped_later() -> None:
    table = rows([0.0] * 3, [0.0] * 3)
    after = ExperiencePipeline([Ramp(), First()], "rl").apply(table)["outcomes"]
    assert after["token_advantages"].to_pylist() == [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
    before = ExperiencePipeline([First(), Ramp()], "rl").apply(table)["outcomes"]
    assert before["token_advantages"].to_pylist() == [[1.0, 2.0, 3.0], None]


@pytest.mark.parametrize(
    ("written", "wording"),
    [
        (
            [[1.0, 2.0]],
            "wrote 2 token_advantages for 3 response tokens of 'explorer/rl/0000001/00000/000",
        ),
        ([[1.0, 2.0, float("nan")]], "wrote token_advantages that are not finite"),
        ([1.0], "must hold lists of floats, found double"),
        ([[1.0] * 3] * 2, "returned 2 values of 'token_advantages' for 1 rows"),
    ],
)
def test_lists_that_do_not_fit_the_response_are_refused(written: list[Any], wording: str) -> None:
    class Wrong(Mapper):
        writes = ("token_advantages",)

        def map(self, rows: pa.Table) -> Mapping[str, Column]:
            return {"token_advantages": written}

    with pytest.raises(OperatorError, match=wording):
        ExperiencePipeline([Wrong()], "rl").apply(rows([0.0] * 3))


def test_the_store_reads_them_in_the_order_asked_in_and_out_of_sealed_files(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path / "store")
    first, second = experience_id(NAME, 0), experience_id(NAME, 1)
    columns = ["rollout", "token_advantages", "advantage"]
    table = rows([0.0] * 3, [0.0] * 3)
    store.commit(Commit(tables={"experiences": table.slice(0, 1)}))
    store.commit(Commit(tables=ExperiencePipeline([], "rl").apply(table.slice(0, 1))))
    assert store.read([first], columns)["token_advantages"].to_pylist() == [None]
    store.seal()
    store.commit(Commit(tables={"experiences": table.slice(1)}))
    store.commit(Commit(tables=ExperiencePipeline([Ramp()], "rl").apply(table.slice(1))))
    for _ in range(2):
        found = store.read([second, first], columns)
        assert found["token_advantages"].to_pylist() == [[1.0, 2.0, 3.0], None]
        assert found["rollout"].to_pylist() == [1, 0]
        store.seal()
    assert "token_advantages" not in store.read([first]).column_names
    store.close()
