from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

from trinity_data.errors import OperatorError
from trinity_operators.base import Filter, FilterResult, Mapper
from trinity_operators.calls import Watch
from trinity_operators.runner import run_operators
from trinity_operators.timeout import in_time

ROWS = pa.table({"experience_id": ["e0", "e1"], "reward": [1.0, None]})


class Does(Filter):
    def __init__(self, what: Callable[[], object]) -> None:
        self.what = what

    def apply(self, rows: pa.Table) -> FilterResult:
        self.what()
        return FilterResult(np.ones(rows.num_rows, bool), "")


class Writes(Mapper):
    writes = ("reward",)

    def __init__(self, *values: float) -> None:
        self.values = values

    def map(self, rows: pa.Table) -> dict[str, list[float]]:
        return {"reward": list(self.values)}


def num_kept(*operators: Filter | Mapper, watch: Watch | None = None) -> int:
    result = run_operators(
        operators, ROWS, row_kind="experience", id_column="experience_id", stage="s", step=1, watch=watch
    )
    return result.survivors.num_rows


def test_an_operator_that_hangs_is_named_with_its_rows_and_the_loop_goes_on() -> None:
    never, ticks = threading.Event(), []

    async def tick() -> None:
        while True:
            ticks.append(time.monotonic())
            await asyncio.sleep(0.01)

    async def main() -> None:
        ticking = asyncio.ensure_future(tick())
        try:
            await in_time(lambda watch: num_kept(Does(int), Does(never.wait), watch=watch), 0.5)
        finally:
            ticking.cancel()

    with pytest.raises(
        OperatorError, match=r"operators\[1\]: 'Does', at 2 rows, the first of them 'e0', did not end within"
    ):
        asyncio.run(main())
    assert len(ticks) > 3
    never.set()


def test_many_operators_that_end_may_take_longer_together_than_one_may() -> None:
    slow = [Does(lambda: time.sleep(0.3)) for _ in range(5)]
    assert asyncio.run(in_time(lambda watch: num_kept(*slow, watch=watch), 1.2)) == 2


def test_sys_exit_in_an_operator_is_its_error() -> None:
    with pytest.raises(OperatorError, match=r"operators\[0\]: 'Does' failed on 2 rows: SystemExit: 0"):
        asyncio.run(in_time(lambda watch: num_kept(Does(lambda: sys.exit(0)), watch=watch), 20))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_no_number_is_refused_with_operator_and_row(value: float) -> None:
    with pytest.raises(OperatorError, match=rf"'Writes' wrote {value} as 'reward' of 'e0' \(1 of 2 rows\)"):
        num_kept(Writes(value, 0.0))


def test_a_row_without_a_reward_may_stay_without_one() -> None:
    assert num_kept(Writes(0.5, float("nan"))) == 2
    with pytest.raises(OperatorError, match="wrote inf as 'reward' of 'e1'"):
        num_kept(Writes(0.5, float("inf")))
