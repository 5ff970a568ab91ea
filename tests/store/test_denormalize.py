"""Sealed files say what finally became of experiences: exactly what outcomes and state changes say,
and never of the future.
"""

from __future__ import annotations

import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trinity_data.query.audit import audit
from trinity_data.schema import FINAL
from trinity_data.store.branch import branch_store
from trinity_data.store.denormalize import nothing_final, with_final_columns
from trinity_data.store.maintenance import Maintenance
from trinity_data.store.parquet import write_sealed
from trinity_data.store.retention import Limits, retain
from trinity_data.store.segments import CLOSED, SEALED, TAIL, Segment, file_checksum
from trinity_data.store.snapshot import at_step, take_snapshot
from trinity_data.store.sql import SqlSession, open_sql
from trinity_data.store.store import Store
from trinity_data.store.types import Commit

EVERYTHING = "FROM experiences ORDER BY experience_id"


def derived(root: Path) -> pa.Table:
    with SqlSession({"run": take_snapshot(root)}, None, "1GB", 1, derived=True) as session:
        return session.query(EVERYTHING)


def shown(root: Path, **options) -> pa.Table:
    with open_sql([root], **options) as session:
        return session.query(EVERYTHING)


def segments(root: Path) -> list[Segment]:
    return [segment for segment in take_snapshot(root).segments if segment.table == "experiences"]


def final_states(root: Path) -> list[str | None]:
    files = [root / segment.file for segment in segments(root) if segment.kind == SEALED]
    return [state for file in files for state in pq.read_table(file)["final_state"].to_pylist()]


def six_outcomes(store: Store, group, outcomes, step: int = 1) -> list[str]:
    """Of eight rows two are trained, two dropped, one stale, one waits,
    one failed and was judged, one is raw.
    """
    rows = group(step, size=8, failed=(6,))
    ids = rows["experience_id"].to_pylist()
    judged = outcomes(rows.slice(0, 7), dropped=(2, 3, 6))
    store.commit(Commit(tables={"experiences": rows, "outcomes": judged}, states=[(ids[4], "stale")]))
    store.form_batch("rl", step, ids[:2])
    return ids


def test_a_sealed_file_says_what_became_of_rows_that_have_ended_and_nothing_of_others(
    store: Store, group, outcomes
) -> None:
    six_outcomes(store, group, outcomes)
    store.seal()
    (segment,) = segments(store.root)
    found = pq.read_table(store.root / segment.file).select(FINAL.names).to_pylist()
    assert [row["final_state"] for row in found] == [
        "trained", "trained", "dropped", "dropped", "stale", None, "failed", None,
    ]  # fmt: skip
    assert found[1] == {
        "final_state": "trained", "final_reward": 11.0, "final_advantage": 0.5,
        "final_scores": [("quality", 0.5)], "final_kept": True, "final_dropped_by": "",
        "final_trained_step": 1, "final_token_rewards": None, "final_token_advantages": None,
    }  # fmt: skip
    assert found[5] == dict.fromkeys(FINAL.names)
    assert segment.num_final == 6
    assert "final_state" not in store.table("experiences").column_names


def test_rows_that_wait_when_they_are_sealed_move_on_in_the_view(store: Store, group, outcomes) -> None:
    ids = six_outcomes(store, group, outcomes)
    store.seal()
    store.form_batch("rl", 2, ids[5:6])
    store.commit(Commit(tables={"experiences": group(3)}))
    assert shown(store.root).equals(derived(store.root))
    states = dict(
        zip(*(shown(store.root)[name].to_pylist() for name in ("experience_id", "state")), strict=True)
    )
    assert (states[ids[5]], states[ids[7]], len(states)) == ("trained", "raw", 12)


@pytest.mark.parametrize("seed", range(2))
def test_the_view_is_what_outcomes_and_moves_say_after_any_history(
    tmp_path: Path, group, outcomes, seed: int
) -> None:
    choose = np.random.default_rng(seed)
    store = Store.create_or_open(tmp_path / "store", tail_bytes=6_000)
    trained: list[str] = []
    for step in range(1, 19):
        rows = group(step, size=6, failed=(4,) if step % 3 else ())
        store.commit(Commit(tables={"experiences": rows}))
        if choose.random() < 0.8:
            store.commit(Commit(tables={"outcomes": outcomes(rows, dropped=(1, 4) if step % 3 else (1,))}))
        waiting = store.pending("rl")
        taken = [str(name) for name in choose.permutation(waiting)[:3]]
        again = [str(name) for name in choose.permutation(trained)[: seed % 2]]
        store.form_batch("rl", step, taken + again, replay=bool(again))
        trained += taken
        if late := sorted(set(waiting) - set(taken))[:1]:
            store.commit(Commit(states=[(late[0], "stale")]))
        if choose.random() < 0.2:
            store.seal()
        if step % 6 == 0:
            assert shown(store.root).equals(derived(store.root))
    store.close()
    assert any(state is not None for state in final_states(store.root))
    assert shown(store.root).equals(derived(store.root))
    assert audit(store.root).problems == []


def test_the_newest_closed_tail_waits_until_the_next_one_is_closed(tmp_path: Path, group, outcomes) -> None:
    store = Store.create_or_open(tmp_path / "store", tail_bytes=20_000)
    for step in range(1, 40):
        store.commit(Commit(tables={"experiences": group(step), "outcomes": outcomes(group(step))}))
        store.form_batch("rl", step, store.pending("rl", through_step=step - 1))
    *older, newest = [segment for segment in segments(store.root) if segment.kind != TAIL]
    assert newest.kind == CLOSED and older
    store.seal()
    assert {segment.kind for segment in segments(store.root)} == {SEALED}
    # only the rows of the last step waited
    assert final_states(store.root).count(None) == 4
    store.close()


def test_sealing_does_not_wait_for_a_tail_that_is_closed_meanwhile(
    tmp_path: Path, group, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.create_or_open(tmp_path / "store", tail_bytes=3_000)
    seal, steps = Maintenance._seal, iter(range(2, 5))

    def beside_a_writer(sealer: Maintenance, segment: Segment) -> None:
        if step := next(steps, None):
            store.commit(Commit(tables={"experiences": group(step)}))
        seal(sealer, segment)

    store.commit(Commit(tables={"experiences": group(1)}))
    monkeypatch.setattr(Maintenance, "_seal", beside_a_writer)
    store.seal()
    assert [segment.kind for segment in segments(store.root)] == [SEALED, CLOSED]
    store.close()


def test_a_past_version_and_a_branch_know_nothing_of_the_future(
    store: Store, tmp_path: Path, group, outcomes
) -> None:
    first = six_outcomes(store, group, outcomes)
    store.form_batch("rl", 2, first[5:6])
    store.seal()
    waited = {"experience_id": first[5], "state": "pending", "trained_step": None}
    asked = f"SELECT experience_id, state, trained_step FROM experiences WHERE experience_id = '{first[5]}'"
    branch_store(store.root, tmp_path / "branch" / "store", at_step(store.root, 1))
    for session in (open_sql([store.root], as_of=1), open_sql([tmp_path / "branch"])):
        with session:
            assert session.query(asked).to_pylist() == [waited]
    assert audit(tmp_path / "branch").problems == []


def test_files_that_are_merged_learn_what_became_of_their_rows_since(tmp_path: Path, group, outcomes) -> None:
    root = tmp_path / "store"
    for step in range(1, 12):
        store = Store.create_or_open(root)
        rows = group(step)
        store.commit(Commit(tables={"experiences": rows, "outcomes": outcomes(rows)}))
        store.seal()
        store.form_batch("rl", step, rows["experience_id"].to_pylist())
        store.close()
    merged = max(segments(root), key=lambda s: s.num_rows)
    assert merged.num_rows >= 32 and merged.num_final >= merged.num_rows - 4
    assert shown(root).equals(derived(root))


def test_a_file_is_written_once_more_when_its_last_rows_have_ended(
    store: Store, tmp_path: Path, group, outcomes
) -> None:
    for step in range(1, 4):
        rows = group(step)
        store.commit(Commit(tables={"experiences": rows, "outcomes": outcomes(rows, dropped=(0,))}))
    store.seal()
    (before,) = segments(store.root)
    branch_store(store.root, tmp_path / "branch", take_snapshot(store.root).version)
    for step in range(1, 4):
        assert final_states(store.root).count(None) == 9
        store.form_batch("rl", step, store.pending("rl", through_step=step))
    reopened = Store.create_or_open(store.root)
    reopened.close()
    assert segments(store.root) == [before]  # the branch shares it
    shutil.rmtree(tmp_path / "branch")
    Store.create_or_open(store.root).close()
    (after,) = segments(store.root)
    assert (after.num_final, final_states(store.root).count(None)) == (12, 0)
    assert shown(store.root).equals(derived(store.root))
    Store.create_or_open(store.root).close()
    assert segments(store.root) == [after]


def test_contents_that_are_expired_leave_what_became_of_the_rows(store: Store, group, outcomes) -> None:
    rows = group(1)
    store.commit(Commit(tables={"experiences": rows, "outcomes": outcomes(rows, dropped=(0, 1, 2, 3))}))
    store.seal()
    before = shown(store.root).select(["experience_id", "state", "advantage", "dropped_by"])
    assert retain(store.root, Limits(max_bytes=0)).num_rows == 4
    assert final_states(store.root) == ["dropped"] * 4
    assert shown(store.root).select(before.column_names).equals(before)
    assert audit(store.root).problems == []


def test_the_audit_names_a_file_that_says_something_else(store: Store, group, outcomes) -> None:
    ids = six_outcomes(store, group, outcomes)
    store.seal()
    store.close()
    (segment,) = segments(store.root)
    path = store.root / segment.file
    rows = pq.read_table(path)
    final = rows.select(FINAL.names)
    states = pa.array(["dropped", *final["final_state"].to_pylist()[1:]])
    final = final.set_column(0, "final_state", states).cast(FINAL)
    plain = rows.drop_columns(FINAL.names)
    written = write_sealed(
        store.root,
        replace(segment, file="segments/experiences/x"),
        [plain],
        plain.schema,
        epoch=9,
        final=final,
    )
    (store.root / written.file).replace(path)
    connection = sqlite3.connect(store.root / "ledger.sqlite")
    size = path.stat().st_size
    connection.execute(
        "UPDATE segments SET num_bytes = ?, checksum = ? WHERE segment = ?",
        (size, file_checksum(path, size), segment.number),
    )
    connection.commit()
    connection.close()
    (problem,) = audit(store.root).problems
    assert f"{ids[0]} is dropped in its file and trained by its rows" in problem


def test_rows_of_a_damaged_store_are_sealed_without_it(store: Store, group, outcomes, caplog) -> None:
    six_outcomes(store, group, outcomes)
    (tail,) = [s for s in store.segments() if s.table == "outcomes"]
    with (store.root / tail.file).open("r+b") as file:
        file.truncate(100)
    store.seal()
    assert "is not written beside them" in caplog.text
    (segment,) = segments(store.root)
    assert (segment.kind, segment.num_final) == (SEALED, 0)
    store.commit(Commit(states=[(name, "stale") for name in (*store.pending("rl"), *store.raw("rl"))]))
    Store.create_or_open(store.root).close()
    assert segments(store.root) == [segment]  # all rows have ended, and nothing more can be said of them


def test_columns_go_beside_rows_that_come_in_parts(group) -> None:
    rows = group(size=5)
    columns = nothing_final(5).set_column(1, "final_reward", pa.array([0.0, 1.0, 2.0, 3.0, 4.0]))
    whole = pa.concat_tables(with_final_columns([rows.slice(0, 2), rows.slice(2)], columns))
    assert whole["final_reward"].to_pylist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert whole.select(rows.column_names).equals(rows)
