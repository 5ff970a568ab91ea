"""Writes of other processes: once each and in their order, over whatever they come."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event

import pyarrow as pa
import pytest

from tests.forked import fork
from trinity_data.errors import StoreError, StoreLockedError
from trinity_data.store import local_writes
from trinity_data.store.client_writes import ClientWrites
from trinity_data.store.local_writes import LocalClient, LocalWrites, listen
from trinity_data.store.messages import Answer, Write, pack
from trinity_data.store.participants import Participant, Participants
from trinity_data.store.shared_bytes import mapped
from trinity_data.store.store import Store
from trinity_data.store.types import MARKS, Commit


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.create_or_open(tmp_path / "store")
    yield opened
    opened.close()


def writes_of(store: Store, *, started_again: bool = False) -> ClientWrites:
    return ClientWrites(store, Participants(store), started_again=started_again, on_progress=lambda: None)


def appending(number: int, commit: Commit, *, client: str = "c") -> Write:
    return Write(client, number, "submit", (commit,), {})


def error_of(answer: Future[Answer]) -> Exception | None:
    return answer.result(timeout=60).error


def test_writes_that_arrive_in_another_order_are_done_in_that_of_their_client(store: Store) -> None:
    writes = writes_of(store)
    sent = [appending(n, Commit(progress={"last": n, f"{n}": n})) for n in (1, 2, 3)]
    checkpoint = Write("c", 4, "record_checkpoint", (1, "global_step_1"), {"stage": "rl"})
    last = appending(5, Commit(progress={"last": 5}))
    answers = [writes.accept(each) for each in (last, checkpoint, sent[2], sent[1])]
    assert not any(answer.done() for answer in answers)
    # of other clients it holds up none
    assert error_of(writes.accept(appending(1, Commit(), client="d"))) is None
    answers.append(writes.accept(sent[0]))
    assert [error_of(answer) for answer in answers] == [None] * 5
    assert (store.progress("last"), store.progress("3")) == (5, 3)
    checkpointed = store.latest_checkpoint()
    assert checkpointed is not None and checkpointed.step == 1


def test_a_write_that_arrives_again_is_not_done_again(store: Store, group) -> None:
    rows = Commit(tables={"experiences": group()})
    writes = writes_of(store)
    assert error_of(writes.accept(appending(1, rows))) is None
    assert error_of(writes.accept(appending(1, rows))) is None
    assert "in the store already" in str(error_of(writes.accept(appending(2, rows))))
    # nor by another process, which does the next one too
    again = writes_of(store, started_again=True)
    assert error_of(again.accept(appending(1, rows))) is None
    assert "in the store already" in str(error_of(again.accept(appending(2, rows))))
    assert error_of(again.accept(appending(3, Commit(progress={"third": 1})))) is None
    assert (store.table("experiences").num_rows, store.progress("third")) == (4, 1)
    assert store.progress(f"{MARKS}/c/3")["number"] == 3


def test_what_the_store_cannot_take_is_refused_and_the_next_write_is_done(store: Store) -> None:
    writes = writes_of(store)
    unreadable = writes.accept(appending(1, Commit(progress={"x": object()})))
    assert isinstance(error_of(unreadable), StoreError)
    missing = Write("c", 2, "form_batch", ("rl", 1, ["no such"]), {})
    assert isinstance(error_of(writes.accept(missing)), StoreError)
    assert error_of(writes.accept(appending(3, Commit(progress={"x": 3})))) is None
    assert store.progress("x") == 3


def test_a_write_without_a_place_waits_for_none_before_it(store: Store) -> None:
    participants = Participants(store)
    place = participants.join(Participant.this_process("trainer"))
    participants.leave(place)
    writes = ClientWrites(store, participants, started_again=True, on_progress=lambda: None)
    late = replace(appending(7, Commit(progress={"x": 1})), place=place)
    assert isinstance(error_of(writes.accept(late)), StoreLockedError)
    assert store.progress("x") is None


def test_marks_of_writes_go_with_the_place_of_their_client(store: Store, group) -> None:
    participants = Participants(store)
    places = [participants.join(Participant.this_process(name)) for name in ("trainer", "trainer2")]
    writes = ClientWrites(store, participants, started_again=False, on_progress=lambda: None)
    rows = Commit(tables={"experiences": group()})
    sent = [replace(appending(1, rows), place=places[0])]
    sent += [
        replace(appending(n, Commit(), client=place.name), place=place) for place in places for n in (1, 2)
    ]
    assert [error_of(writes.accept(each)) for each in sent] == [None] * 5
    assert len(store.progress_below(MARKS)) == 5
    participants.leave(places[0])
    assert list(store.progress_below(MARKS)) == [each.mark_key for each in sent[3:]]
    # one that arrives again is refused, and so not done twice
    assert isinstance(error_of(writes.accept(sent[0])), StoreLockedError)
    assert store.table("experiences").num_rows == 4


@pytest.fixture
def service(store: Store) -> Iterator[LocalWrites]:
    opened = listen(writes_of(store).accept)
    assert opened is not None
    yield opened
    opened.close()


def test_local_writes_are_durable_when_they_are_answered(store: Store, service: LocalWrites, group) -> None:
    folder = Path(service.address.path).parent
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    client = LocalClient(service.address)
    rows = group(1, size=8)
    assert client.write(pack(appending(1, Commit(tables={"experiences": rows})))).error is None
    assert store.table("experiences").equals(rows.replace_schema_metadata(None))
    refused = client.write(pack(appending(2, Commit(tables={"experiences": rows}))))
    assert isinstance(refused.error, StoreError) and "in the store already" in str(refused.error)
    service.close()
    assert not folder.exists()
    with pytest.raises(ConnectionError):
        client.write(pack(appending(3, Commit())))
    client.close()


def test_rows_of_any_size_arrive_by_the_memory_of_one_connection(
    store: Store, service: LocalWrites, group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It grows, is given back after a large write, and keeps the rest of what was there before."""
    monkeypatch.setattr(local_writes, "KEPT_BYTES", 1 << 20)
    client = LocalClient(service.address)
    sent = [group(step, size=size) for step, size in enumerate((8, 3, 9000, 1, 12_000, 9000), 1)]
    assert [rows.nbytes > 1 << 20 for rows in sent] == [False, False, True, False, True, True]
    for number, rows in enumerate(sent, 1):
        assert client.write(pack(appending(number, Commit(tables={"experiences": rows})))).error is None
    assert store.table("experiences").equals(pa.concat_tables(sent).replace_schema_metadata(None))
    client.close()


def test_threads_share_a_client(store: Store, service: LocalWrites) -> None:
    client = LocalClient(service.address)
    sent = [pack(appending(n, Commit(progress={f"{n}": n, "last": n}))) for n in range(1, 41)]
    with ThreadPoolExecutor(8) as threads:
        assert [answer.error for answer in threads.map(client.write, sent)] == [None] * 40
    assert [store.progress(f"{n}") for n in (1, 40)] == [1, 40] and store.progress("last") == 40
    client.close()


def test_a_client_waits_for_an_answer_no_longer_than_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_writes, "ANSWER_SECONDS", 0.5)
    answer = Future[Answer]()
    service = listen(lambda write: answer)
    assert service is not None
    with pytest.raises(TimeoutError):
        LocalClient(service.address).write(pack(appending(1, Commit())))
    answer.set_result(Answer())
    service.close()


def test_who_waits_for_a_service_that_is_closed_gets_no_answer() -> None:
    arrived, answer = Event(), Future[Answer]()

    def accept(write: Write) -> Future[Answer]:
        arrived.set()
        return answer

    service = listen(accept)
    assert service is not None
    client = LocalClient(service.address)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(client.write, pack(appending(1, Commit())))
        assert arrived.wait(60)
        service.close()
        assert isinstance(waiting.exception(60), ConnectionError)
    answer.set_result(Answer())


def test_the_write_of_a_client_that_is_killed_before_its_answer_is_done_whole(store: Store, group) -> None:
    writes, arrived = writes_of(store), Future[Future[Answer]]()

    def accept(write: Write) -> Future[Answer]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        arrived.set_result(writes.accept(write))
        return arrived.result()

    service, rows = listen(accept), group(1, size=8)
    assert service is not None
    address, content = service.address, pack(appending(1, Commit(tables={"experiences": rows})))
    output, pid = fork(lambda send: send(f"{LocalClient(address).write(content)}"))
    with output:
        assert output.read() == ""
    assert error_of(arrived.result(60)) is None
    assert store.table("experiences").equals(rows.replace_schema_metadata(None))
    service.close()


def test_memory_that_another_process_could_take_away_is_not_read() -> None:
    with pytest.raises(PermissionError):
        mapped(os.memfd_create("test", os.MFD_ALLOW_SEALING))
