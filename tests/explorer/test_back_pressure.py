"""An explorer that makes more than the trainer takes waits when the buffer is full,
and goes on when it is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from trinity_data.config import SynchronizerConfig
from trinity_data.query.audit import audit
from trinity_data.store.backpressure import Backpressure
from trinity_data.store.store import Store
from trinity_data.store.types import State
from trinity_data.synchronizer import Synchronizer
from trinity_explorer.explorer import Explorer
from trinity_trainer.sampling.sampler import ExploredSampler, FifoSelection

ROWS_A_STEP, TAKEN, LAST_STEP = 12, 6, 8


async def train(batches: ExploredSampler, store: Store, synchronizer: Synchronizer, seen: list[int]) -> None:
    """Takes a batch a step, and remembers how many rows waited before each."""
    for step in range(1, LAST_STEP + 1):
        ids = await batches.next(step)
        assert ids is not None and len(ids) == TAKEN
        seen.append(store.num_pending("rl"))
        store.form_batch("rl", step, ids)
        await synchronizer.finished_training(step)


async def side_by_side(
    store: Store, make_explorer: Callable[..., Explorer], capacity: Backpressure
) -> list[int]:
    """How many rows waited before each batch."""
    synchronizer = Synchronizer(SynchronizerConfig(), limit=capacity)
    explorer = make_explorer("explorer", synchronizer)
    fifo = FifoSelection(store, "rl", whole_groups=False)
    batches = ExploredSampler(
        store, synchronizer, fifo, stage="rl", train_batch_size=TAKEN, max_read_timeout=30.0
    )
    seen = list[int]()
    async with asyncio.TaskGroup() as both:
        both.create_task(explorer.explore(1, LAST_STEP))
        both.create_task(train(batches, store, synchronizer, seen))
    return seen


@pytest.mark.parametrize("limit", ["rollouts", "bytes"])
def test_the_explorer_waits_for_room_and_resumes_when_the_trainer_has_consumed(
    store: Store, make_explorer: Callable[..., Explorer], tmp_path: Path, limit: str
) -> None:
    capacity = (
        Backpressure(store, "rl", max_rollouts=20, max_bytes=None)
        if limit == "rollouts"
        else Backpressure(store, "rl", max_rollouts=10**6, max_bytes=2_000)
    )
    seen = asyncio.run(side_by_side(store, make_explorer, capacity))
    events = [row for row in store.table("events").to_pylist() if row["kind"] == "explorer_waits"]
    waits = [row["message"] for row in events]
    assert waits
    assert all("wait for the trainer; capacity" in message for message in waits)
    explored = set(store.table("groups")["step"].to_pylist())
    assert events[0]["step"] in explored  # the step it waited for was explored afterwards
    if limit == "rollouts":
        # 12 rows a step, of which 6 are taken: 24 of the first four steps are too many
        assert waits[0] == "24 rollouts wait for the trainer; capacity is 20" and max(seen) < 20 + ROWS_A_STEP
    counts = store.counts()
    assert counts[State.TRAINED] == TAKEN * LAST_STEP
    assert counts[State.TRAINED] + counts[State.PENDING] == ROWS_A_STEP * len(explored)
    assert audit(tmp_path).total.unexplained == 0
