"""Operators that wait: groups pass through them beside each other, and an error is the row's."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.operators.test_experience_pipeline import EveryThird, group
from trinity_data.errors import OperatorError
from trinity_data.schema import group_id, rows_to_table
from trinity_data.store.store import Store
from trinity_data.store.types import State
from trinity_operators.asynchronous import AsyncMapper, Row
from trinity_operators.base import Filter, FilterResult, Mapper, Operator
from trinity_operators.experience_pipeline import ExperiencePipeline, ExperienceWriter
from trinity_operators.filters import RewardFilter
from trinity_operators.row_answer import RowAnswer


class Asks(AsyncMapper):
    """Waits `seconds` for each row, and fails on those with a reward of `fails_at`."""

    reads = ("experience_id", "reward")
    writes = ("judged",)

    def __init__(self, seconds: float = 0.0, fails_at: float | None = None) -> None:
        self.seconds, self.fails_at = seconds, fails_at
        self.asked: list[str] = []
        self.num_waiting = self.most_waiting = 0

    async def map_row(self, row: Row) -> RowAnswer:
        self.asked.append(row["experience_id"])
        self.num_waiting += 1
        self.most_waiting = max(self.most_waiting, self.num_waiting)
        await asyncio.sleep(self.seconds)
        self.num_waiting -= 1
        if row["reward"] == self.fails_at:
            raise ValueError("no number in 'maybe'")
        return RowAnswer(row["reward"] * 10, f"because of {row['reward']:g}", {"requests": 1})


class Raises(Filter):
    """Fails on every table that holds a reward of `at`."""

    def __init__(self, at: float) -> None:
        self.at = at

    def apply(self, rows: pa.Table) -> FilterResult:
        if self.at in rows["reward"].to_pylist():
            raise KeyError("level")
        return FilterResult(np.ones(rows.num_rows, bool), "")


def writer(store: Store, *operators: Operator, rate: float = 1.0, **limits: Any) -> ExperienceWriter:
    return ExperienceWriter(
        store, ExperiencePipeline(operators, "rl", max_error_rate=rate), explorer="explorer", **limits
    )


def write(to: ExperienceWriter, *groups: Sequence[float]) -> None:
    """Groups of step 1 with these rewards, all at the same time."""

    async def go() -> None:
        await to.prepare()
        async with asyncio.TaskGroup() as adding:
            for position, rewards in enumerate(groups):
                rows = group(1, position, rewards)
                adding.create_task(to.add_group(rows, rows))

    try:
        asyncio.run(go())
    except* OperatorError as errors:
        raise errors.exceptions[0] from None
    finally:
        to.pipeline.close()


def outcomes(store: Store) -> dict[str, Mapping[str, Any]]:
    return {
        row["experience_id"].split("/", 3)[-1]: row
        for row in store.table("outcomes").to_pylist(maps_as_pydicts="lossy")
    }


def errors_of(store: Store) -> dict[str, str]:
    return {
        row["row_id"].split("/", 3)[-1]: row["reason"]
        for row in store.table("decisions").to_pylist()
        if not row["kept"]
    }


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with_rows = Store.create_or_open(tmp_path / "store")
    yield with_rows
    with_rows.close()


def test_groups_wait_at_the_same_time_and_each_is_stored_with_its_answers(store: Store) -> None:
    asks = Asks(seconds=0.05)
    asks.max_in_flight = 6
    write(writer(store, RewardFilter(threshold=1.0), asks), *[[0, 1, 2]] * 8)
    assert asks.most_waiting == 6  # of more than one group
    rows = outcomes(store)
    assert len(rows) == 24
    assert {row["scores"].get("judged") for row in rows.values()} == {None, 10.0, 20.0}
    reasons = {row["reason"] for row in store.table("decisions").to_pylist() if row["operator"] == "Asks"}
    assert reasons == {"because of 1", "because of 2"}


def test_a_row_without_an_answer_is_dropped_with_the_error_and_has_no_score(store: Store) -> None:
    to = writer(store, Asks(fails_at=2), RewardFilter(threshold=1.0))
    write(to, [1, 2, 3])
    (failed,) = [row for row in outcomes(store).values() if row["dropped_by"] == "Asks"]
    assert (failed["kept"], failed["scores"], failed["reward"]) == (False, {}, 2.0)
    assert list(errors_of(store).values()) == ["error: ValueError: no number in 'maybe'"]
    (asked, filtered) = to.pipeline.counts_table(1).to_pylist()
    assert (asked["rows_in"], asked["rows_out"], filtered["rows_in"]) == (3, 2, 2)
    assert dict(asked["metrics"]) == {"errors": 1.0, "requests": 2.0}
    assert store.counts()[State.DROPPED] == 1
    again = ExperiencePipeline(to.pipeline.operators, "rl", max_error_rate=1.0)
    again.resume_step(store, 1, [group_id("explorer", "rl", 1, 0)])
    assert [count.errors for count in again.counts(1)] == [1, 0]
    assert again.counts(1)[0].metrics == to.pipeline.counts(1)[0].metrics


def test_more_errors_than_the_rate_allows_end_the_run_with_operator_and_row(store: Store) -> None:
    to = writer(store, Asks(fails_at=2), rate=0.25)
    to.pipeline.expect(1, 8)
    with pytest.raises(
        OperatorError,
        match=r"step 1: 'Asks' failed on 3 of 8 rows, and max_error_rate is 0.25; "
        "explorer/rl/0000001/.*: ValueError: no number in 'maybe'",
    ):
        write(to, [1, 2], [1, 2], [1, 2], [1, 1])
    assert len(store.table("experiences")) == 8  # nothing is lost
    with pytest.raises(OperatorError, match=r"operators\[0\]: 'Asks' failed on 'explorer/.*no number"):
        ExperiencePipeline([Asks(fails_at=2)], "rl").apply(rows_to_table("experiences", group(1, 0, [1, 2])))


def test_an_operator_that_waits_too_long_costs_its_group_and_no_other(store: Store) -> None:
    class SometimesSilent(Asks):
        async def map_row(self, row: Row) -> RowAnswer:
            if row["reward"] == 5:
                await asyncio.sleep(60)
            return await super().map_row(row)

    write(writer(store, SometimesSilent(), operator_timeout=3.0), [1, 2], [4, 5], [1, 3])
    rows = outcomes(store)
    assert [row["kept"] for _, row in sorted(rows.items())] == [True, True, False, False, True, True]
    assert all("did not end within `operator_timeout`, 3 s" in text for text in errors_of(store).values())


def test_a_row_that_takes_too_long_costs_no_other_row(store: Store) -> None:
    class SlowRow(Asks):
        row_timeout = 1.5

        async def map_row(self, row: Row) -> RowAnswer:
            self.seconds = 60 if row["reward"] == 2 else 0
            return await super().map_row(row)

    write(writer(store, SlowRow()), [1, 2, 3])
    assert list(errors_of(store).values()) == ["error: no answer within row_timeout, 1.5 s"]


def test_an_operator_that_raises_costs_the_groups_that_it_raises_on() -> None:
    pipeline = ExperiencePipeline([Raises(at=2), RewardFilter(threshold=0)], "rl", max_error_rate=0.5)
    rows = [
        row
        for position, rewards in enumerate([[0, 1], [2, 3], [4, 5]])
        for row in group(1, position, rewards)
    ]
    tables = pipeline.apply(rows_to_table("experiences", rows))
    assert tables["outcomes"]["kept"].to_pylist() == [True, True, False, False, True, True]
    failed = [row["reason"] for row in tables["decisions"].to_pylist() if not row["kept"]]
    assert failed == ["error: operators[0]: 'Raises' failed on 2 rows: KeyError: 'level'"] * 2
    assert [(count.rows_in, count.rows_out, count.errors) for count in pipeline.counts(1)] == [
        (6, 4, 2),
        (4, 4, 0),
    ]
    with pytest.raises(OperatorError, match=r"operators\[0\]: 'Raises' failed on 6 rows: KeyError: 'level'"):
        ExperiencePipeline([Raises(at=2)], "rl").apply(rows_to_table("experiences", rows))


def test_an_operator_in_process_that_hangs_still_ends_the_run(store: Store) -> None:
    never = threading.Event()

    class Hangs(Mapper):
        def map(self, rows: pa.Table) -> dict[str, Any]:
            never.wait()
            return {}

    with pytest.raises(OperatorError, match=r"operators\[1\]: 'Hangs', at 2 rows, .* did not end within"):
        write(writer(store, Asks(), Hangs(), operator_timeout=2.0), [1, 2])
    never.set()


def test_groups_reach_an_operator_that_keeps_state_one_after_another(store: Store) -> None:
    class LaterFaster(Asks):
        async def map_row(self, row: Row) -> RowAnswer:
            self.seconds = 0.05 if "/00000/" in row["experience_id"] else 0.0
            return await super().map_row(row)

    write(writer(store, LaterFaster(), EveryThird()), [1, 1, 1, 1], [1, 1, 1, 1])
    kept = [row["kept"] for row in store.table("outcomes").to_pylist()]
    assert kept == [True, False, False, True, False, False, True, False]


def test_rollouts_wait_with_an_event_while_too_many_groups_wait(store: Store) -> None:
    async def go() -> float:
        to = writer(store, Asks(seconds=0.2), max_waiting_groups=2)
        await to.prepare()
        adding = []
        for position in range(2):
            rows = group(1, position, [1])
            adding.append(asyncio.ensure_future(to.add_group(rows, rows)))
        await to.wait_for_room(1)
        while to._num_waiting < 2:
            await asyncio.sleep(0.001)
        waits = [to.wait_for_room(1), to.wait_for_room(1)]
        started = time.monotonic()
        await asyncio.gather(*waits)
        waited = time.monotonic() - started
        await asyncio.gather(*adding)
        return waited

    assert asyncio.run(go()) > 0.05
    (event,) = store.table("events").to_pylist()
    assert (event["kind"], event["message"]) == (
        "operators_behind",
        "2 groups wait for Asks (max_waiting_groups)",
    )
