"""What a store promises to the process that writes it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pytest
import ray

from trinity_data.errors import ConflictError, StoreError, StoreLockedError
from trinity_data.schema import rows_to_table
from trinity_data.store.ledger import open_for_writing
from trinity_data.store.remote import RemoteStore, start_store
from trinity_data.store.segments import CLOSED, SEALED, replace_segment, segments_of
from trinity_data.store.sql import SqlSession
from trinity_data.store.store import Store
from trinity_data.store.types import Commit, State

AnyStore: TypeAlias = Store | RemoteStore


@pytest.fixture(params=["in process", "in an actor"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AnyStore]:
    """The store as the process that owns it has it, and as another process has it."""
    if request.param == "in process":
        yield request.getfixturevalue("store")
        return
    request.getfixturevalue("ray_session")
    actor = start_store(tmp_path / "store")
    remote = RemoteStore(actor, tmp_path / "store")
    yield remote
    remote.close()
    ray.kill(actor)


def ids_of(rows: pa.Table) -> list[str]:
    return rows["experience_id"].to_pylist()


def in_states(store: AnyStore) -> dict[str, int]:
    return {state: number for state, number in store.counts().items() if number}


def test_rows_progress_and_states_are_there_after_reopening(tmp_path: Path, group, outcomes) -> None:
    rows = group(size=4, failed=(3,))
    store = Store.create_or_open(tmp_path / "store")
    store.commit(Commit(tables={"experiences": rows}, progress={"stream": {"position": 7}}))
    store.commit(Commit(tables={"outcomes": outcomes(rows.slice(0, 3), dropped=(2,))}))
    store.close()

    again = Store.create_or_open(tmp_path / "store")
    assert again.table("experiences").equals(rows.replace_schema_metadata(None))
    assert again.progress("stream") == {"position": 7}
    assert again.progress("nothing") is None
    assert in_states(again) == {"pending": 2, "dropped": 1, "failed": 1}
    assert again.group_progress("rl", 1) == list(
        zip(ids_of(rows), [State.PENDING, State.PENDING, State.DROPPED, State.FAILED], strict=True)
    )
    again.close()


def test_progress_is_found_by_what_its_keys_begin_with_and_none_removes_it(any_store: AnyStore) -> None:
    any_store.commit(Commit(progress={"a/b": 1, "a/c": 2, "a/😀": 3, "a": 4, "b": 5, "a0": 6}))
    assert any_store.progress_below("a/") == {"a/b": 1, "a/c": 2, "a/😀": 3}
    any_store.commit(Commit(progress={"a/b": None, "a/c": 7, "nowhere": None}))
    assert any_store.progress_below("a/") == {"a/c": 7, "a/😀": 3}
    assert any_store.progress("a/b") is None


def test_a_table_comes_whole_part_by_part_and_as_of_one_version(any_store: AnyStore, group) -> None:
    first, second = group(1), group(2)
    any_store.commit(Commit(tables={"experiences": first}))
    any_store.seal()
    any_store.commit(Commit(tables={"experiences": second}))
    snapshot = any_store.snapshot()
    any_store.commit(Commit(tables={"experiences": group(3)}))
    parts = list(any_store.parts("experiences"))
    assert [part.num_rows for part in parts] == [4, 8]
    assert pa.concat_tables(parts).equals(any_store.table("experiences"))
    assert list(any_store.parts("steps")) == []
    with SqlSession({"run": snapshot}, 60, "1GB", None) as session:
        rows = session.query("select experience_id from rollouts order by all")
    assert ids_of(rows) == sorted(ids_of(first) + ids_of(second))


def test_an_event_and_the_commit_beside_it_are_one_transaction(any_store: AnyStore, group) -> None:
    any_store.log_event(
        "rl", 3, "stage_finished", "after 3 steps", commit=Commit(progress={"at": 3})
    ).result()
    (row,) = any_store.table("events").to_pylist()
    assert (row["stage"], row["step"], row["kind"], row["message"]) == (
        "rl",
        3,
        "stage_finished",
        "after 3 steps",
    )
    assert any_store.progress("at") == 3
    rows = group()
    any_store.commit(Commit(tables={"experiences": rows}))
    with pytest.raises(StoreError):
        any_store.log_event("rl", 4, "stale", "again", commit=Commit(tables={"experiences": rows})).result()
    assert any_store.table("events").num_rows == 1


def test_a_commit_that_rests_on_progress_that_has_changed_writes_nothing(any_store: AnyStore, group) -> None:
    any_store.commit(Commit(progress={"claims": {"1": "a"}}, expected={"claims": None}))
    with pytest.raises(ConflictError, match="another process has changed 'claims' meanwhile"):
        any_store.commit(
            Commit(tables={"experiences": group()}, progress={"other": 1}, expected={"claims": {"1": "b"}})
        )
    assert any_store.table("experiences").num_rows == 0 and any_store.progress("other") is None
    any_store.commit(Commit(progress={"claims": None}, expected={"claims": {"1": "a"}, "other": None}))
    assert any_store.progress("claims") is None


def test_a_stage_has_ended_until_it_is_opened_again(store: Store) -> None:
    assert store.stage_ended_at("rl") is None
    store.commit(Commit(progress={"stage_done/rl": 7}))
    assert store.stage_ended_at("rl") == 7
    store.commit(Commit(progress={"stage_done/rl": None}))
    assert store.stage_ended_at("rl") is None


def test_a_file_takes_the_place_of_one_that_the_ledger_names_and_of_no_other(tmp_path: Path, group) -> None:
    store = Store.create_or_open(tmp_path / "store")
    store.commit(Commit(tables={"experiences": group()}))
    store.close()
    with closing(open_for_writing(tmp_path / "store")) as ledger:
        (tail,) = segments_of(ledger, "experiences")
        sealed = replace(tail, kind=SEALED, file="segments/experiences/00000001.1.parquet", num_bytes=9)
        assert not replace_segment(ledger, replace(tail, file="segments/experiences/00000009.arrows"), sealed)
        assert not replace_segment(ledger, replace(tail, kind=CLOSED), sealed)
        assert segments_of(ledger, "experiences") == [tail]
        assert replace_segment(ledger, tail, sealed)
        assert segments_of(ledger, "experiences") == [sealed]


def test_a_reopened_store_goes_on_in_the_same_tail(tmp_path: Path, group) -> None:
    for position in range(3):
        store = Store.create_or_open(tmp_path / "store")
        store.commit(Commit(tables={"experiences": group(position=position)}))
        store.close()
    store = Store.create_or_open(tmp_path / "store")
    assert [(s.kind, s.num_rows) for s in store.segments()] == [("tail", 12)]
    assert (
        store.table("experiences", columns=["position"])["position"].to_pylist()
        == [0] * 4 + [1] * 4 + [2] * 4
    )
    store.close()


def test_a_duplicate_id_is_refused_and_nothing_of_its_commit_is_written(any_store: AnyStore, group) -> None:
    first, second = group(position=0), group(position=1)
    any_store.commit(Commit(tables={"experiences": first}))
    mixed = pa.concat_tables([second, first.slice(2, 1)])
    steps = rows_to_table("steps", [{"step": 1, "stage": "rl"}])
    with pytest.raises(StoreError, match=r"explorer/rl/0000001/00000/002/00.*in the store already"):
        any_store.commit(Commit(tables={"steps": steps, "experiences": mixed}, progress={"at": 2}))
    assert any_store.table("experiences").num_rows == 4
    assert any_store.table("steps").num_rows == 0
    assert any_store.progress("at") is None
    assert in_states(any_store) == {"raw": 4}
    any_store.commit(Commit(tables={"experiences": second}))
    assert any_store.table("experiences").num_rows == 8


def test_an_id_twice_in_one_commit_is_refused(store: Store, group) -> None:
    rows = group(size=1)
    with pytest.raises(StoreError, match="one commit twice"):
        store.commit(Commit(tables={"experiences": pa.concat_tables([rows, rows])}))
    assert store.counts()[State.RAW] == 0


def test_rows_and_their_outcomes_may_come_in_one_commit(any_store: AnyStore, group, outcomes) -> None:
    rows = group()
    any_store.commit(Commit(tables={"outcomes": outcomes(rows), "experiences": rows}))
    assert any_store.pending("rl") == ids_of(rows)
    assert any_store.raw("rl") == []


@pytest.mark.parametrize("change", ["outcome", "state"])
def test_an_unknown_experience_is_refused(store: Store, group, outcomes, change: str) -> None:
    rows = group(size=1)
    commit = (
        Commit(tables={"outcomes": outcomes(rows)})
        if change == "outcome"
        else Commit(states=[(ids_of(rows)[0], State.STALE)])
    )
    with pytest.raises(StoreError, match="not in the store"):
        store.commit(commit)
    assert store.table("outcomes").num_rows == 0


def test_a_second_outcome_is_refused(store: Store, group, outcomes) -> None:
    rows = group()
    store.commit(Commit(tables={"experiences": rows, "outcomes": outcomes(rows)}))
    with pytest.raises(StoreError, match="has an outcome already"):
        store.commit(Commit(tables={"outcomes": outcomes(rows.slice(0, 1))}))
    assert store.table("outcomes").num_rows == 4


def test_states_of_a_commit_are_the_first_states_of_its_rows(store: Store, group) -> None:
    rows = group(size=2)
    identifiers = ids_of(rows)
    store.commit(Commit(tables={"experiences": rows}, states=[(identifiers[0], State.PENDING)]))
    assert in_states(store) == {"pending": 1, "raw": 1}
    store.commit(Commit(states=[(identifiers[0], State.STALE)]))
    assert in_states(store) == {"stale": 1, "raw": 1}
    with pytest.raises(StoreError, match="is stale and cannot become pending"):
        store.commit(Commit(states=[(identifiers[0], State.PENDING)]))


def test_only_a_batch_makes_rows_trained(any_store: AnyStore, group) -> None:
    rows = group(size=1)
    with pytest.raises(StoreError, match="only form_batch"):
        any_store.submit(Commit(tables={"experiences": rows}, states=[(ids_of(rows)[0], State.TRAINED)]))


def test_pending_rows_come_in_the_order_of_their_steps_not_of_their_arrival(
    store: Store, group, outcomes
) -> None:
    for step, position in [(2, 0), (1, 1), (3, 0), (1, 0)]:
        rows = group(step, position, 2)
        store.commit(Commit(tables={"experiences": rows, "outcomes": outcomes(rows)}))
    expected = ids_of(pa.concat_tables([group(1, 0, 2), group(1, 1, 2), group(2, 0, 2), group(3, 0, 2)]))
    assert store.pending("rl") == expected
    assert store.pending("rl", through_step=1) == expected[:4]
    assert store.pending("rl", limit=3) == expected[:3]
    assert store.pending("sft") == []


def test_a_batch_is_formed_exactly_once(tmp_path: Path, group, outcomes) -> None:
    rows = group(size=6)
    store = Store.create_or_open(tmp_path / "store")
    store.commit(Commit(tables={"experiences": rows, "outcomes": outcomes(rows, dropped=(5,))}))
    identifiers = ids_of(rows)
    batch = [identifiers[3], identifiers[0]]
    store.form_batch("rl", 1, batch)
    store.form_batch("rl", 1, batch)  # the same one again: nothing happens
    assert in_states(store) == {"trained": 2, "pending": 3, "dropped": 1}
    with pytest.raises(StoreError, match="step 1 has another batch already, of 2 experiences"):
        store.form_batch("rl", 1, identifiers[1:3])
    with pytest.raises(StoreError, match="is trained; the batch of step 2 may take only pending ones"):
        store.form_batch("rl", 2, identifiers[:2])
    with pytest.raises(StoreError, match="is dropped"):
        store.form_batch("rl", 2, [identifiers[5]])
    with pytest.raises(StoreError, match="names an experience twice"):
        store.form_batch("rl", 2, [identifiers[1], identifiers[1]])
    store.close()

    again = Store.create_or_open(tmp_path / "store")
    assert again.batch(1) == batch
    assert again.batch(2) is None
    assert in_states(again) == {"trained": 2, "pending": 3, "dropped": 1}
    again.close()


def test_taking_a_batch_records_it_and_gives_its_rows_in_order_each_time(
    store: Store, group, outcomes
) -> None:
    rows = group(size=3)
    store.commit(Commit(tables={"experiences": rows, "outcomes": outcomes(rows)}))
    batch = [ids_of(rows)[2], ids_of(rows)[0]]
    taken = [store.take_batch("rl", 1, batch, columns=["experience_id"]) for _ in range(2)]
    assert taken[0].column_names == ["experience_id", "advantage", "shaped_reward"] and taken[0] == taken[1]
    assert ids_of(taken[0]) == store.batch(1) == batch
    assert in_states(store) == {"trained": 2, "pending": 1}
    with pytest.raises(StoreError, match="step 1 has another batch already"):
        store.take_batch("rl", 1, batch[:1])
    with pytest.raises(StoreError, match="is trained"):
        store.take_batch("rl", 2, batch[:1])
    again = store.take_batch("rl", 2, batch[:1], replay=True)
    assert ids_of(again) == store.batch(2) == batch[:1]


def test_an_empty_batch_is_a_batch(store: Store) -> None:
    store.form_batch("rl", 1, [])
    assert store.batch(1) == []


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_reading_gives_the_rows_in_the_order_asked(
    store: Store, group, outcomes, sealed: bool, seed: int
) -> None:
    parts = [group(1, position, 8) for position in range(30)]
    for part in parts:
        store.commit(Commit(tables={"experiences": part, "outcomes": outcomes(part)}))
    if sealed:
        store.seal()
    rows = pa.concat_tables(parts)
    order = np.random.default_rng(seed).permutation(rows.num_rows)[:50]
    expected = rows.take(order)
    read = store.read(ids_of(expected))
    assert read.drop_columns(["advantage", "shaped_reward"]).equals(expected.replace_schema_metadata(None))
    rewards = np.array(expected["reward"])
    np.testing.assert_array_equal(read["advantage"], rewards - 0.5)
    np.testing.assert_array_equal(read["shaped_reward"], rewards + 10)


def test_reading_some_columns_of_rows_without_an_outcome(store: Store, group) -> None:
    rows = group(size=2)
    store.commit(Commit(tables={"experiences": rows}))
    read = store.read(ids_of(rows)[::-1], columns=["token_ids", "advantage"])
    assert read.column_names == ["token_ids", "advantage", "shaped_reward"]
    assert read["token_ids"].to_pylist() == [[10, 11, 21, 31, 41], [10, 11, 20, 30, 40]]
    assert read["advantage"].to_pylist() == [None, None]
    assert store.read(ids_of(rows), columns=["advantage"]).to_pydict() == {
        "advantage": [None, None],
        "shaped_reward": [None, None],
    }
    assert store.read([]).num_rows == 0
    with pytest.raises(StoreError, match="'nobody' is not in the store"):
        store.read(["nobody"])
    with pytest.raises(StoreError, match=r"no column 'token_id' \(did you mean 'token_ids'\?\)"):
        store.read(ids_of(rows), columns=["token_id"])


def test_a_hot_run_of_rows_is_read_without_copying_its_tokens(store: Store, group) -> None:
    rows = group(size=8)
    store.commit(Commit(tables={"experiences": rows}))
    allocated = pa.total_allocated_bytes()
    first, second = (store.read(ids_of(rows)[2:6], columns=["token_ids"])["token_ids"] for _ in range(2))
    assert pa.total_allocated_bytes() - allocated < 2048
    (one,), (other,) = first.chunks, second.chunks
    assert one.values.buffers()[1].address == other.values.buffers()[1].address


def test_tables_are_cast_to_the_schema_and_unknown_columns_refused(any_store: AnyStore) -> None:
    any_store.commit(Commit(tables={"steps": pa.table({"step": pa.array([1], pa.int32()), "stage": ["rl"]})}))
    steps = any_store.table("steps")
    assert steps["step"].type == pa.int64()
    assert steps["loss"].to_pylist() == [None]
    with pytest.raises(StoreError, match=r"'steps' has no column 'los' \(did you mean 'loss'\?\)"):
        any_store.commit(Commit(tables={"steps": pa.table({"los": [1.0]})}))
    with pytest.raises(StoreError, match=r"unknown table 'step'"):
        any_store.commit(Commit(tables={"step": pa.table({"step": [1]})}))
    with pytest.raises(StoreError, match=r"experiences.stage is missing in 1 rows"):
        any_store.commit(Commit(tables={"experiences": pa.table({"experience_id": ["a"]})}))


def test_a_table_can_be_read_by_stage_and_column(any_store: AnyStore, group) -> None:
    any_store.commit(Commit(tables={"experiences": group(stage="sft")}))
    any_store.commit(Commit(tables={"experiences": group(stage="rl", size=2)}))
    assert any_store.table("experiences", stage="sft").num_rows == 4
    assert any_store.table("experiences", columns=["rollout"], stage="rl").to_pydict() == {"rollout": [0, 1]}
    assert any_store.counts(stage="rl")[State.RAW] == 2
    with pytest.raises(StoreError, match="unknown table"):
        any_store.table("experience")


def test_checkpoints_name_their_position_in_the_ledger(any_store: AnyStore, group) -> None:
    assert any_store.latest_checkpoint() is None
    any_store.record_checkpoint(1, "global_step_1", stage="rl")
    first = any_store.latest_checkpoint()
    any_store.commit(Commit(tables={"experiences": group()}))
    any_store.record_checkpoint(2, "global_step_2", stage="rl")
    second = any_store.latest_checkpoint()
    assert first is not None and second is not None
    assert (second.step, second.path, second.stage) == (2, "global_step_2", "rl")
    assert second.position > first.position
    any_store.forget_checkpoint(2)
    assert any_store.latest_checkpoint() == first


def test_submitted_commits_keep_their_order_and_share_disk_commits(store: Store, group) -> None:
    futures = [
        store.submit(Commit(tables={"experiences": group(1, p)}, progress={"at": p})) for p in range(200)
    ]
    for future in futures:
        future.result(timeout=30)
    positions = store.table("experiences", columns=["position"])["position"].to_pylist()
    assert positions == [position for position in range(200) for _ in range(4)]
    assert store.progress("at") == 199
    (tail,) = store.segments()
    stream = pa.py_buffer((store.root / tail.file).read_bytes()[: tail.num_bytes])
    assert len(list(pa.ipc.open_stream(stream))) < 200


def test_one_refused_commit_does_not_take_the_others_with_it(any_store: AnyStore, group) -> None:
    commits = [Commit(tables={"experiences": group(1, position)}) for position in (0, 1, 0, 2)]
    futures = [any_store.submit(commit) for commit in commits]
    assert [isinstance(future.exception(timeout=30), StoreError) for future in futures] == [
        False,
        False,
        True,
        False,
    ]
    assert any_store.counts()[State.RAW] == 12


def test_threads_may_commit_at_the_same_time(store: Store, group) -> None:
    def write(stage: str) -> None:
        for position in range(20):
            store.commit(Commit(tables={"experiences": group(1, position, 2, stage=stage)}))

    threads = [threading.Thread(target=write, args=(f"stage-{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert in_states(store) == {"raw": 160}
    assert len(set(ids_of(store.table("experiences")))) == 160


def test_a_newer_writer_fences_the_older_one(tmp_path: Path, group) -> None:
    old = Store.create_or_open(tmp_path / "store")
    old.commit(Commit(tables={"experiences": group(position=0)}))
    new = Store.create_or_open(tmp_path / "store")
    new.commit(Commit(tables={"experiences": group(position=1)}))
    with pytest.raises(StoreLockedError, match="another process has become the writer"):
        old.commit(Commit(tables={"experiences": group(position=2)}))
    new.commit(Commit(tables={"experiences": group(position=3)}))
    old.close()
    assert new.table("experiences", columns=["position"])["position"].unique().to_pylist() == [0, 1, 3]
    new.close()


def test_a_closed_store_refuses_commits(tmp_path: Path, group) -> None:
    store = Store.create_or_open(tmp_path / "store")
    store.close()
    with pytest.raises(StoreError, match="is closed"):
        store.submit(Commit(tables={"experiences": group()}))


def test_tasks_come_in_the_order_asked_of_one_stage_alone(store: Store) -> None:
    for stage in ("rl", "other"):
        rows = [{"task_id": name, "stage": stage, "prompt": f"{stage} {name}"} for name in "abc"]
        store.commit(Commit(tables={"tasks": rows_to_table("tasks", rows)}))
    found = store.tasks(["c", "unknown", "a", "c"], stage="rl", columns=["prompt", "task_id"])
    assert found.column_names == ["prompt", "task_id"]
    assert found["prompt"].to_pylist() == ["rl c", None, "rl a", "rl c"]
