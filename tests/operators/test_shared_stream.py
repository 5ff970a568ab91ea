"""The tasks of a set that several explorers share: one reads it, the others take what it stores."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.noting_store import NotingStore
from tests.operators.task_streams import stream_spec, write_rows
from trinity_data.errors import StoreError
from trinity_data.lease import Lease
from trinity_data.status import Status
from trinity_data.store.participants import Participant, Participants
from trinity_data.store.types import Place
from trinity_operators.shared_stream import SharedStream
from trinity_operators.task_chunks import StreamSpec
from trinity_operators.task_pipeline import TaskStream

NUM_TASKS = 30


class SharedByTwo(NotingStore):
    """With the news of the store's process."""

    place: Place | None = None

    async def news(
        self, seen: Mapping[str, Any], keys: Sequence[str], below: str, seconds: float
    ) -> dict[str, Any]:
        def now() -> dict[str, Any]:
            return {key: self.progress(key) for key in keys} | self.progress_below(below)

        while (values := await asyncio.to_thread(now)) == seen:
            await asyncio.sleep(0.01)
        return values


@pytest.fixture
def store(tmp_path: Path) -> SharedByTwo:
    store = SharedByTwo.open(tmp_path / "store")
    assert isinstance(store, SharedByTwo)
    return store


@pytest.fixture
def spec(tmp_path: Path) -> StreamSpec:
    write_rows(tmp_path, [{"question": f"What is {i}?", "answer": str(i)} for i in range(NUM_TASKS)])
    return stream_spec(tmp_path, ())


def shared(store: SharedByTwo, spec: StreamSpec, participants: Participants, name: str) -> SharedStream:
    """Of an explorer of this name, as on another machine."""
    place = participants.join(Participant(f"explorer:{name}", "node2", "another machine", 7, 1))
    return SharedStream(
        store,
        spec.stage,
        spec.taskset.name,
        lease=Lease(store, spec.stage, f"tasks/{spec.taskset.name}", place),
        open_stream=lambda: TaskStream(spec, store, window=10, status=Status("run")),
    )


async def next_ids(stream: SharedStream, number: int) -> list[str]:
    tasks = [await asyncio.wait_for(stream.next(), 60) for _ in range(number)]
    return [task.task_id for task in tasks if task is not None]


def test_explorers_take_the_same_tasks_and_read_no_ledger_on_their_event_loop(
    store: SharedByTwo, spec: StreamSpec
) -> None:
    async def take() -> tuple[list[str], list[str], set[threading.Thread]]:
        participants = Participants(store)
        first, second = (shared(store, spec, participants, name) for name in ("a", "b"))
        store.readers.clear()
        first.start()
        of_first = await next_ids(first, NUM_TASKS + 1)
        second.start()
        of_second = await next_ids(second, NUM_TASKS + 1)
        readers = {*store.readers}
        await first.close()
        await second.close()
        return of_first, of_second, readers

    of_first, of_second, readers = asyncio.run(take())
    assert len(of_first) == NUM_TASKS
    assert of_second == of_first
    assert readers and threading.main_thread() not in readers


def test_an_explorer_reads_the_set_on_from_where_one_that_left_has_come_to(
    store: SharedByTwo, spec: StreamSpec
) -> None:
    async def take() -> tuple[list[str], list[str], set[threading.Thread]]:
        participants = Participants(store)
        first, second = (shared(store, spec, participants, name) for name in ("a", "b"))
        first.start()
        of_first = await next_ids(first, 3)
        await first.close()
        participants.leave(Place("explorer:a", 1))
        store.readers.clear()
        second.start()
        of_second = await next_ids(second, NUM_TASKS + 1)
        readers = {*store.readers}
        await second.close()
        return of_first, of_second, readers

    of_first, of_second, readers = asyncio.run(take())
    assert len(set(of_second)) == NUM_TASKS
    assert of_second[:3] == of_first
    assert threading.main_thread() not in readers
    assert len(store.table("tasks")) == NUM_TASKS


def test_a_set_that_cannot_be_opened_fails_the_explorer_that_asks_for_a_task(
    store: SharedByTwo, spec: StreamSpec
) -> None:
    async def take() -> None:
        stream = shared(store, spec, Participants(store), "a")
        store.close()
        stream.start()
        try:
            await asyncio.wait_for(stream.next(), 60)
        finally:
            await stream.close()

    with pytest.raises(StoreError, match="closed"):
        asyncio.run(take())
