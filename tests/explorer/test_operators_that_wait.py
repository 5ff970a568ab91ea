"""A run that is killed while groups wait for an operator asks again about these, and about no others."""

from __future__ import annotations

import asyncio
from collections import Counter

from tests.explorer.conftest import Bench, put_tasks
from trinity_operators.asynchronous import AsyncMapper, Row
from trinity_operators.row_answer import RowAnswer


class SilentAbout(AsyncMapper):
    """Answers at once, but never about the rows of one group."""

    reads = ("experience_id",)
    writes = ("asked",)

    def __init__(self, group: str = "") -> None:
        self.group = group
        self.asked = Counter[str]()

    async def map_row(self, row: Row) -> RowAnswer:
        self.asked[row["experience_id"]] += 1
        if self.group and self.group in row["experience_id"]:
            await asyncio.sleep(600)
        return RowAnswer(1.0, totals={"requests": 1, "tokens": 10})


def test_after_a_kill_only_groups_without_outcomes_are_asked_about_again(bench: Bench) -> None:
    tasks = put_tasks(bench.store, 20)
    silent, answers = SilentAbout("/00001/"), SilentAbout()

    async def killed() -> None:
        bench.operators = [silent]
        exploring = asyncio.ensure_future(bench.explorer(tasks).explore(1, 1))
        # three groups of four: two of them get outcomes
        while len(bench.table("outcomes")) < 8 or len(silent.asked) < 12:
            await asyncio.sleep(0.01)
        exploring.cancel()
        await asyncio.gather(exploring, return_exceptions=True)

    async def again() -> None:
        bench.operators = [answers]
        await bench.explorer(tasks).explore(1, 1)

    asyncio.run(killed())
    assert len(bench.table("experiences")) == 12  # durable before the operator was asked
    asyncio.run(again())
    assert len(bench.table("outcomes")) == 12
    assert len(answers.asked) == 4 and all("/00001/" in row_id for row_id in answers.asked)
    assert {*silent.asked.values(), *answers.asked.values()} == {1}
    (counts,) = bench.table("operators")
    assert (counts["rows_in"], counts["rows_out"]) == (12, 12)
    # of both sessions
    assert dict(counts["metrics"]) == {"requests": 12.0, "tokens": 120.0}
