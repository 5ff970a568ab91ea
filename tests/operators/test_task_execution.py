"""Where task operators run, decided without running them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from trinity_data.config import OperatorConfig, TaskPipelineConfig
from trinity_data.errors import ConfigError
from trinity_operators.base import Filter, FilterResult, Operator
from trinity_operators.task_execution import Execution, plan_execution

LENGTH = {"name": "text_length_filter", "args": {"min_len": 1, "max_len": 9}}
TWO_WORKERS = (OperatorConfig(**LENGTH, concurrency=2),)


class Length(Filter):
    name = "text_length_filter"

    def apply(self, rows: pa.Table) -> FilterResult:
        return FilterResult(np.ones(rows.num_rows, dtype=np.bool_), "")


def operator(**declared: Any) -> Operator:
    declares = Length()
    vars(declares).update(declared)
    return declares


def plan(*operators: Operator, **pipeline: Any) -> Execution:
    configs = pipeline.pop("configs", tuple(OperatorConfig(**LENGTH) for _ in operators))
    return plan_execution(TaskPipelineConfig(operators=configs, **pipeline), operators, Path())


def test_a_chain_without_needs_begins_in_process_and_says_why() -> None:
    assert str(plan(operator())) == "in process: no operator needs a worker of its own"


@pytest.mark.parametrize(
    ("declared", "pipeline", "may_move"),
    [
        ({}, {}, True),
        ({"keeps_state": True}, {}, False),
        ({"whole_set": True}, {}, False),
        ({}, {"execution": "in_process"}, False),
    ],
)
def test_a_chain_may_move_to_workers_unless_it_needs_earlier_rows_or_the_file_says_where_it_runs(
    declared: dict[str, Any], pipeline: dict[str, Any], may_move: bool
) -> None:
    execution = plan(operator(), operator(**declared), **pipeline)
    assert (execution.where, execution.may_move) == ("in_process", may_move)


@pytest.mark.parametrize(
    ("declared", "pipeline", "reason"),
    [
        ({}, {"num_process": 3}, "`num_process` is 3"),
        ({"num_gpus": 0.5}, {}, "'text_length_filter' declares what it needs"),
        ({"slow_start": True}, {}, "'text_length_filter' declares what it needs"),
        ({"model": "grader"}, {}, "'text_length_filter' declares what it needs"),
        ({}, {"configs": TWO_WORKERS}, "'text_length_filter' has `concurrency`"),
        ({}, {"configs": (OperatorConfig(name="./own.py:Own"),)}, "'./own.py:Own' is code of its own"),
        ({}, {"execution": "ray"}, "`execution: ray`"),
    ],
)  # fmt: skip
def test_a_chain_that_needs_workers_gets_them_and_says_why(
    declared: dict[str, Any], pipeline: dict[str, Any], reason: str
) -> None:
    execution = plan(operator(**declared), **pipeline)
    assert execution.where == "ray"
    assert execution.reason.startswith(reason)


def test_an_operator_that_declares_what_it_needs_has_workers_of_its_own() -> None:
    configs = (OperatorConfig(**LENGTH), OperatorConfig(**LENGTH, concurrency=3))
    execution = plan(operator(), operator(num_cpus=2.0), configs=configs, num_process=2)
    assert execution.num_workers == 3  # so that each of the operator's workers has a caller
    assert [(own.position, own.num_workers, own.in_order) for own in execution.own_workers] == [(1, 3, False)]
    assert str(execution) == ("on Ray Data, 3 workers, 3 of 'text_length_filter' alone: `num_process` is 2")


def test_an_operator_that_keeps_state_has_one_worker_in_order_where_several_read() -> None:
    several = plan(operator(), operator(keeps_state=True), num_process=4)
    assert [(own.position, own.num_workers, own.in_order) for own in several.own_workers] == [(1, 1, True)]
    one = plan(operator(), operator(keeps_state=True), execution="ray")
    assert one.own_workers == ()


def test_an_operator_of_the_whole_set_has_the_chain_in_one_worker() -> None:
    assert plan(operator(), operator(whole_set=True), num_process=4).num_workers == 1


@pytest.mark.parametrize("attribute", ["keeps_state", "whole_set"])
def test_an_operator_that_can_have_one_worker_is_given_no_more(attribute: str) -> None:
    with pytest.raises(ConfigError, match=r"operators\[0\]: 'text_length_filter' .* found concurrency 2"):
        plan(operator(**{attribute: True}), configs=TWO_WORKERS)


def test_several_processes_are_refused_in_process() -> None:
    with pytest.raises(ValueError, match="num_process 2 with execution: in_process"):
        TaskPipelineConfig(num_process=2, execution="in_process")
