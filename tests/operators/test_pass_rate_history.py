"""Tasks by how often they were solved in runs on record."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from trinity_data.errors import OperatorError, StoreError
from trinity_data.query.result import Runs
from trinity_data.schema import rows_to_table
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_operators.base import FilterResult
from trinity_operators.pass_rate_history import PassRateHistoryFilter


def tasks_of(run: Path) -> pa.Table:
    """Those of the small run in their order, and one that it has not."""
    rows = Runs([run]).sql("select prompt, answer from tasks order by position").arrow().to_pylist()
    return pa.Table.from_pylist([*rows, {"prompt": "new", "answer": "1"}])


def apply(operator: PassRateHistoryFilter, rows: pa.Table) -> FilterResult:
    operator.prepare()
    return operator.apply(rows)


def test_rates_and_uses_are_those_on_record(small_run: Path) -> None:
    # of number 0 one of two was solved, of number 1 both, of number 2 one, the other failed
    operator = PassRateHistoryFilter(runs=[str(small_run)], max_rate=0.9)
    result = apply(operator, tasks_of(small_run))
    nan = np.nan
    np.testing.assert_array_equal(np.asarray(result.scores["pass_rate"]), [0.5, 1.0, 1.0, nan, nan, nan])
    np.testing.assert_array_equal(np.asarray(result.scores["usage_frequency"]), [1, 1, 1, 0, 0, 0])
    assert result.keep.tolist() == [True, False, False, True, True, True]
    assert pa.array(result.reason).to_pylist()[1] == "pass rate on record above 0.9"


def test_tasks_with_too_few_rollouts_can_be_dropped(small_run: Path) -> None:
    operator = PassRateHistoryFilter(runs=[str(small_run)], min_rollouts=2, untried="drop")
    result = apply(operator, tasks_of(small_run))
    assert result.keep.tolist() == [True, True, False, False, False, False]
    assert pa.array(result.reason).to_pylist()[2] == "fewer than 2 rollouts on record"


def test_runs_add_up(small_run: Path) -> None:
    operator = PassRateHistoryFilter(runs=[str(small_run)] * 2, min_rollouts=4, untried="drop")
    assert apply(operator, tasks_of(small_run)).keep.tolist() == [True, True, False, False, False, False]


def test_of_its_own_run_a_stage_sees_the_others(small_run: Path) -> None:
    rows = tasks_of(small_run)
    later = PassRateHistoryFilter(run_folder=str(small_run), stage_name="later", untried="drop")
    assert apply(later, rows).keep.sum() == 3
    own = PassRateHistoryFilter(run_folder=str(small_run), stage_name="grpo", untried="drop")
    assert apply(own, rows).keep.sum() == 0


def test_the_newest_evaluation_counts(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path / "run" / "store")
    where = {"stage": "warmup", "taskset": "probe", "prompt": "a", "answer": "1"}
    rows = [where | {"step": step, "accuracy": step / 10, "rollout": 0} for step in (0, 10)]
    store.commit(Commit(tables={"evals": rows_to_table("evals", rows)}))
    store.close()
    operator = PassRateHistoryFilter(runs=[str(tmp_path / "run")], source="evals")
    result = apply(operator, pa.table({"prompt": ["a", "b"], "answer": ["1", "1"]}))
    np.testing.assert_array_equal(np.asarray(result.value), [1.0, np.nan])


def test_a_run_that_there_is_not_is_named_before_the_first_row() -> None:
    with pytest.raises(StoreError, match="no run 'gsm8k/nothing'"):
        PassRateHistoryFilter(runs=["gsm8k/nothing"]).prepare()
    with pytest.raises(OperatorError, match="argument runs"):
        PassRateHistoryFilter().prepare()
