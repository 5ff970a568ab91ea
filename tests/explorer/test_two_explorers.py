"""Two explorers write into one store at the same time: their ids never coincide,
and neither takes the other's work.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from trinity_data.query.audit import audit
from trinity_data.store.store import Store
from trinity_data.store.types import State
from trinity_explorer.explorer import Explorer

STEPS, ROWS_A_STEP = 3, 12


def test_explorers_of_two_names_write_at_once_and_nothing_is_lost_or_doubled(
    store: Store, make_explorer: Callable[..., Explorer], tmp_path: Path
) -> None:
    async def side_by_side() -> None:
        async with asyncio.TaskGroup() as both:
            for name in ("explorer", "explorer_new"):
                both.create_task(make_explorer(name).explore(1, STEPS))

    asyncio.run(side_by_side())
    rows = store.table("experiences").to_pylist()
    assert len({row["experience_id"] for row in rows}) == len(rows) == 2 * STEPS * ROWS_A_STEP
    assert all(row["experience_id"].startswith(f"{row['explorer']}/rl/") for row in rows)
    assert Counter((row["explorer"], row["step"]) for row in rows) == {
        (name, step): ROWS_A_STEP for name in ("explorer", "explorer_new") for step in range(1, STEPS + 1)
    }
    order = [row["explorer"] for row in rows]
    assert order != sorted(order)  # they did write between each other
    assert store.counts()[State.PENDING] == len(rows)
    assert audit(tmp_path).problems == []


def test_a_later_explorer_begins_groups_of_its_own(
    store: Store, make_explorer: Callable[..., Explorer]
) -> None:
    asyncio.run(make_explorer("explorer").explore(1, 1))
    asyncio.run(make_explorer("late").explore(1, 1))
    groups = store.table("groups").to_pylist()
    assert [row["group_id"].split("/")[0] for row in groups] == ["explorer"] * 3 + ["late"] * 3
    assert [row["task_id"] for row in groups[:3]] == [row["task_id"] for row in groups[3:]]
    # each goes on behind its own tasks
    asyncio.run(make_explorer("late").explore(2, 2))
    tried = [row["task_id"] for row in store.table("groups").to_pylist()]
    assert len(set(tried[3:])) == 6
