"""What a store in an actor promises beside what every store does: nothing lost and nothing twice when its
process ends.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
from ray.exceptions import RayActorError

from trinity_data.errors import StoreError, StoreLockedError
from trinity_data.log_files import LogFiles
from trinity_data.schema import rows_to_table
from trinity_data.store.messages import Write, pack, pieces_of
from trinity_data.store.participants import KEY, Participant
from trinity_data.store.reader import StoreReader
from trinity_data.store.remote import RemoteStore, local_reader, start_store
from trinity_data.store.store import Store
from trinity_data.store.types import MARKS, Commit, State

pytestmark = pytest.mark.usefixtures("ray_session")

OF_THE_OWNER = {"create_or_open", "segments", "forget", "expired"}
"""Methods that work on the files themselves."""


@pytest.fixture
def actor(tmp_path: Path) -> Iterator[Any]:
    started = start_store(tmp_path / "store")
    yield started
    ray.kill(started)


def kill(actor: Any) -> None:
    """Ends the actor's process as the kernel would for want of memory; Ray starts another."""
    os.kill(ray.get(actor.process_id.remote()), signal.SIGKILL)


def public_methods(kind: type) -> dict[str, inspect.Signature]:
    methods = inspect.getmembers(kind, inspect.isfunction) + inspect.getmembers(kind, inspect.ismethod)
    return {name: inspect.signature(each) for name, each in methods if not name.startswith("_")}


def test_a_remote_store_has_the_methods_of_a_store() -> None:
    ours = public_methods(Store)
    theirs = public_methods(RemoteStore)
    del theirs["news"], theirs["give_up"]
    assert theirs == {name: ours[name] for name in ours.keys() - OF_THE_OWNER}


def test_news_come_when_the_progress_that_was_asked_for_has_changed(actor: Any, tmp_path: Path) -> None:
    remote = RemoteStore(actor, tmp_path / "store")

    async def heard() -> list[dict[str, Any]]:
        first = await remote.news({}, ["explored/rl"], "sync/rl/", 60)
        waiting = asyncio.create_task(remote.news(first, ["explored/rl"], "sync/rl/", 60))
        await asyncio.sleep(0.2)
        for progress in ({"sync/rl2/trained": 1}, {"explored/rl": 3}):
            await asyncio.wrap_future(remote.submit(Commit(progress=progress)))
        second = await waiting
        await asyncio.wrap_future(remote.submit(Commit(progress={"sync/rl/trained": 2})))
        third = await remote.news(second, ["explored/rl"], "sync/rl/", 60)
        return [first, second, third, await remote.news(third, ["explored/rl"], "sync/rl/", 0.1)]

    first, second, third, last = asyncio.run(heard())
    assert (first, second) == ({"explored/rl": None}, {"explored/rl": 3})
    assert third == last == {"explored/rl": 3, "sync/rl/trained": 2}


def test_news_come_when_a_process_joins_or_leaves(actor: Any, tmp_path: Path) -> None:
    remote, this = RemoteStore(actor, tmp_path / "store"), Participant.this_process("trainer")

    async def heard() -> list[str]:
        first = await remote.news({}, [KEY], "sync/rl/", 60)
        waiting = asyncio.create_task(remote.news(first, [KEY], "sync/rl/", 60))
        place = (await actor.join.remote(this)).value
        second = await asyncio.wait_for(waiting, 40)
        waiting = asyncio.create_task(remote.news(second, [KEY], "sync/rl/", 60))
        await actor.leave.remote(place)
        third = await asyncio.wait_for(waiting, 40)
        return [each[KEY]["trainer"]["ended"] for each in (second, third)]

    assert asyncio.run(heard()) == ["", "left"]


def test_writes_under_way_when_the_process_ends_are_done_once_and_in_order(
    actor: Any, tmp_path: Path, group
) -> None:
    clients = [RemoteStore(actor, tmp_path / "store") for _ in range(2)]
    futures = []
    for position in range(120):
        for number, client in enumerate(clients):
            rows = group(1, position, 2, stage=f"stage {number}")
            futures.append(
                client.submit(Commit(tables={"experiences": rows}, progress={f"{number}": position}))
            )
        if position in (40, 80):
            kill(actor)
    for future in futures:
        future.result(timeout=120)
    for number, client in enumerate(clients):
        rows = client.table("experiences", columns=["position"], stage=f"stage {number}")
        assert rows["position"].to_pylist() == [position for position in range(120) for _ in range(2)]
        assert client.progress(f"{number}") == 119
    assert clients[0].counts()[State.RAW] == 480


def test_a_write_that_was_refused_stays_refused_and_one_that_was_done_is_not_repeated(
    actor: Any, tmp_path: Path, group
) -> None:
    remote = RemoteStore(actor, tmp_path / "store")
    rows = Commit(tables={"experiences": group()})
    remote.commit(rows)
    with pytest.raises(StoreError, match="in the store already"):
        remote.commit(rows)
    remote.record_checkpoint(1, "global_step_1", stage="rl")
    marks = [remote.progress(f"{MARKS}/{remote.client}/{number}") for number in (1, 2, 3)]
    kill(actor)
    # as Ray repeats a call whose answer was lost
    first, second, third = (
        ray.get(
            actor.write.remote(*pieces_of(pack(Write(remote.client, number, method, arguments, options))))
        )
        for number, method, arguments, options in (
            (1, "submit", (rows,), {}),
            (2, "submit", (rows,), {}),
            (3, "record_checkpoint", (1, "global_step_1"), {"stage": "rl"}),
        )
    )
    assert first.error is None and third.error is None
    assert isinstance(second.error, StoreError) and "in the store already" in str(second.error)
    assert remote.table("experiences").num_rows == 4
    assert [remote.progress(f"{MARKS}/{remote.client}/{number}") for number in (1, 2, 3)] == marks
    assert [mark["number"] for mark in marks] == [1, 2, 3]
    remote.commit(Commit(progress={"goes on": True}))
    assert remote.progress("goes on")


def test_what_cannot_be_sent_is_refused_and_the_next_write_is_done(actor: Any, tmp_path: Path) -> None:
    remote = RemoteStore(actor, tmp_path / "store")
    with pytest.raises(TypeError, match="JSON"):
        remote.submit(Commit(progress={"x": object()}))
    remote.submit(Commit(progress={"x": 1})).result(timeout=60)
    assert remote.progress("x") == 1


def test_a_store_that_cannot_be_opened_names_its_cause(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    actor = start_store(tmp_path / "store")
    with pytest.raises(StoreError, match="store"):
        RemoteStore(actor, tmp_path / "store").counts()


def test_tables_of_any_size_arrive_as_they_were_sent(actor: Any, tmp_path: Path, group) -> None:
    remote = RemoteStore(actor, tmp_path / "store")
    # in one piece, several, and more than go with a call
    sent, num_pieces = [group(1), group(2, size=1000), group(3, size=8000)], []
    for number, rows in enumerate(sent, 1):
        events = rows_to_table("events", [{"kind": "sent", "step": rows.num_rows}])
        commit = Commit(tables={"experiences": rows, "events": events})
        # as a client on another machine sends it
        pieces = pieces_of(pack(Write(remote.client, number, "submit", (commit,), {})))
        assert ray.get(actor.write.remote(*pieces)).error is None
        remote.commit(commit)
        num_pieces.append(len(pieces))
    assert num_pieces == [1, 5, 1]
    stored = remote.table("experiences")
    assert stored.equals(pa.concat_tables(sent).replace_schema_metadata(None))
    assert remote.table("events")["step"].to_pylist() == [4, 1000, 8000]


def test_a_client_on_the_machine_of_the_store_reads_its_files(actor: Any, tmp_path: Path, group) -> None:
    root = tmp_path / "store"
    reader = local_reader(actor, root)
    assert reader is not None
    (tmp_path / "elsewhere").mkdir()
    assert local_reader(actor, tmp_path / "elsewhere") is None
    near, far = RemoteStore(actor, root, reader=reader), RemoteStore(actor, tmp_path / "elsewhere")
    for step in (1, 2):
        near.commit(Commit(tables={"experiences": group(step)}))
        near.seal()
        assert near.table("experiences").equals(far.table("experiences"))
        assert near.snapshot().version == far.snapshot().version
    near.close()


def test_a_process_that_has_lost_its_place_may_not_write(actor: Any, tmp_path: Path) -> None:
    place = ray.get(actor.join.remote(Participant.this_process("trainer"))).value
    remote = RemoteStore(actor, tmp_path / "store", place=place)
    remote.commit(Commit(progress={"step": 1}))
    kill(actor)
    remote.commit(Commit(progress={"step": 2}))
    ray.get(actor.leave.remote(place))
    for _ in range(2):
        with pytest.raises(StoreLockedError, match="trainer lost its place in this run"):
            remote.commit(Commit(progress={"step": 3}))
    assert remote.progress("step") == 2


def test_what_waits_for_a_store_that_is_given_up_ends_with_the_reason(actor: Any, tmp_path: Path) -> None:
    remote = RemoteStore(actor, tmp_path / "store")
    remote.commit(Commit(progress={"step": 1}))
    owner = ray.get(actor.process_id.remote())
    os.kill(owner, signal.SIGSTOP)
    write = remote.submit(Commit(progress={"step": 2}))
    remote.give_up(StoreError("Ray has ended"))
    for ask in (write.result, lambda: remote.progress("step"), lambda: remote.commit(Commit())):
        with pytest.raises(StoreError, match="Ray has ended"):
            ask()
    os.kill(owner, signal.SIGCONT)
    remote.close()


def test_a_shared_store_ends_when_nobody_takes_part_in_a_cluster_of_others(tmp_path: Path) -> None:
    name, logs = f"store {tmp_path}", LogFiles(tmp_path / "log", "INFO", by_node=False)
    actor = start_store(tmp_path / "store", shared_as=name, idle_seconds=3, logs=logs)
    place = ray.get(actor.join.remote(Participant.this_process("trainer"))).value
    same = start_store(tmp_path / "store", shared_as=name, idle_seconds=3)
    assert ray.get(same.process_id.remote()) == ray.get(actor.process_id.remote())
    ray.get(actor.leave.remote(place))
    with pytest.raises(RayActorError):
        for _ in range(600):
            ray.get(actor.process_id.remote(), timeout=60)
            time.sleep(0.1)
    reader = StoreReader(tmp_path / "store")
    assert [row["kind"] for row in reader.table("events").to_pylist()] == ["joined", "left"]
    reader.close()
    assert (tmp_path / "log" / "store.log").is_file()
