"""What operators reported of a step that a session left in the middle, by hand-counted numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.operators.test_experience_pipeline import group, table
from trinity_data.schema import group_id
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_operators.base import Filter, FilterResult
from trinity_operators.counts import Metric
from trinity_operators.experience_pipeline import ExperiencePipeline, ExperienceWriter
from trinity_operators.stored_counts import stored_counts


class Reports(Filter):
    """Reports the mean of the rewards and how many rows there were."""

    reads = ("reward",)

    def apply(self, rows: pa.Table) -> FilterResult:
        rewards = rows["reward"].to_numpy()
        return FilterResult(
            rewards > 0, "zero", metrics={"mean": float(np.mean(rewards))}, totals={"rows": rows.num_rows}
        )


class Renamed(Reports):
    """The same in the place of the other."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.create_or_open(tmp_path / "store")
    yield opened
    opened.close()


def groups_of(step: int, *, explorer: str = "explorer") -> list[str]:
    """Of a step's first two groups."""
    return [group_id(explorer, "rl", step, position) for position in range(2)]


def write(store: Store, operator: Filter, position: int, rewards: list[float], *, step: int = 1) -> None:
    """One group, by a session that knows nothing of the one before but what is in the store."""

    async def go() -> None:
        pipeline = ExperiencePipeline([operator], "rl")
        pipeline.resume_step(store, step, groups_of(step))
        writer = ExperienceWriter(store, pipeline, explorer="explorer")
        await writer.prepare()
        rows = [row | {"response_length": 7} for row in group(step, position, rewards)]
        await writer.add_group(rows, rows)

    asyncio.run(go())


def test_a_step_in_two_sessions_has_the_metrics_of_one(store: Store) -> None:
    write(store, Reports(), 0, [0, 3])
    write(store, Reports(), 1, [4, 5, 6])
    (count,) = stored_counts(store, stage="rl", step=1, groups=groups_of(1))
    assert (count.rows_in, count.rows_out) == (5, 4)
    # (1.5 × 2 + 5 × 3) / 5
    # the row with the reward 0 is dropped
    assert count.metrics == {
        "mean": Metric(3.6, 5), "rows": Metric(5.0, 0), "dropped_tokens": Metric(7.0, 0),
    }  # fmt: skip
    assert stored_counts(store, stage="rl", step=1, groups=groups_of(1, explorer="other")) == []


def test_an_operator_in_the_place_of_another_is_counted_apart(store: Store) -> None:
    write(store, Reports(), 0, [0, 3])
    write(store, Renamed(), 1, [4, 5, 6])
    counts = stored_counts(store, stage="rl", step=1, groups=groups_of(1))
    rows = {count.operator: (count.position, count.rows_in, count.metrics["rows"].value) for count in counts}
    assert rows == {"Reports": (0, 2, 2.0), "Renamed": (0, 3, 3.0)}


def test_metrics_of_another_step_or_of_other_decisions_do_not_count(store: Store) -> None:
    write(store, Reports(), 0, [0, 3])
    write(store, Reports(), 0, [4, 5], step=2)
    (count,) = stored_counts(store, stage="rl", step=1, groups=groups_of(1))
    assert (count.rows_in, count.metrics) == (2, {"dropped_tokens": Metric(7.0, 0)})
    # decisions without the metrics, as a branch has them
    tables = ExperiencePipeline([Reports()], "rl").apply(table(group(2, 1, [1.0])))
    store.commit(Commit(tables={"experiences": table(group(2, 1, [1.0]))} | tables))
    (count,) = stored_counts(store, stage="rl", step=2, groups=groups_of(2))
    assert (count.rows_in, count.metrics) == (3, {})
