"""The audit counts every row, and finds each fault that is put into a store by hand."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from trinity_data.query.audit import audit
from trinity_data.schema import rows_to_table
from trinity_data.store.store import Store
from trinity_data.store.types import Commit, State


@pytest.fixture
def run(tmp_path: Path, group, outcomes) -> Path:
    store = Store.create_or_open(tmp_path / "store")
    for step in (1, 2):
        rows = group(step, 0, 8, failed=(7,))
        ids = rows["experience_id"].to_pylist()
        store.commit(Commit(tables={"experiences": rows}))
        store.commit(Commit(tables={"outcomes": outcomes(rows.slice(0, 6), dropped=(4, 5))}))
        store.commit(Commit(states=[(ids[3], State.STALE)]))
        store.form_batch("rl", step, ids[:2])
        batches = [{"step": step, "stage": "rl", "experience_id": name} for name in ids[:2]]
        store.commit(Commit(tables={"batches": rows_to_table("batches", batches)}))
        if step == 1:
            store.seal()
    store.close()
    return tmp_path


def change_ledger(run: Path, *statements: str) -> None:
    connection = sqlite3.connect(run / "store" / "ledger.sqlite")
    for statement in statements:
        assert connection.execute(statement).rowcount != 0
    connection.commit()
    connection.close()


def test_a_sound_store_has_everything_explained(run: Path) -> None:
    report = audit(run)
    assert report.problems == []
    assert report.ok
    assert [(row.stage, row.step, row.generated, row.unexplained) for row in report.rows] == [
        ("rl", 1, 8, 0),
        ("rl", 2, 8, 0),
    ]
    for row in report.rows:
        assert row.states == {
            State.RAW: 1,
            State.PENDING: 1,
            State.TRAINED: 2,
            State.DROPPED: 2,
            State.STALE: 1,
            State.FAILED: 1,
        }
        assert row.dropped_by == {"reward_filter": 2}


def test_an_empty_store_is_sound(tmp_path: Path) -> None:
    Store.create_or_open(tmp_path / "store").close()
    report = audit(tmp_path)
    assert (report.rows, report.problems) == ([], [])


FIRST, SECOND = "explorer/rl/0000001/00000/000/00", "explorer/rl/0000001/00000/001/00"
FAULTS = [
    (
        f"UPDATE experiences SET state = 'pending' WHERE experience_id = '{FIRST}'",
        f"another state than its rows: {FIRST} is pending in the ledger and trained by its rows",
    ),
    ("UPDATE tallies SET num_rows = 3 WHERE state = 'trained' AND step = 2", "tally 3, rows 2"),
    (
        "INSERT INTO batch_rows VALUES (2, 2, 0)",
        f"an experience is in two batches: {FIRST} in steps 1, 2",
    ),
    ("DELETE FROM batches WHERE step = 2", "a batch is not as long as it was when it was formed: step 2"),
    ("DELETE FROM batch_rows WHERE step = 1 AND position = 1", "a trained row belongs to no batch"),
    (
        "INSERT INTO batch_rows VALUES (1, 2, 999)",
        "a batch names a row that is no experience: row 999 in step 1",
    ),
    (
        f"DELETE FROM experiences WHERE experience_id = '{SECOND}'",
        f"an experience is in the rows but not in the ledger: {SECOND}",
    ),
    (
        "INSERT INTO experiences (row, experience_id, stage, step, position, rollout, turn, state) "
        "VALUES (99, 'ghost', 'rl', 1, 0, 9, 0, 'raw')",
        "stage 'rl', step 1: 8 generated, -1 unexplained",
    ),
    (
        f"UPDATE experiences SET advantage = 7 WHERE experience_id = '{FIRST}'",
        f"another advantage or reward than its outcome: {FIRST}",
    ),
    (
        f"UPDATE experiences SET step = 2 WHERE experience_id = '{FIRST}'",
        "stage 'rl', step 1: 8 generated, 1 unexplained",
    ),
    (
        "UPDATE segments SET checksum = checksum + 1 WHERE kind = 'sealed' AND table_name = 'outcomes'",
        "is damaged: its checksum is",
    ),
    (
        "UPDATE segments SET first_row = first_row + 1 WHERE kind = 'tail' AND table_name = 'state_changes'",
        "begins at row",
    ),
]


@pytest.mark.parametrize(("fault", "finding"), FAULTS)
def test_an_injected_fault_is_found(run: Path, fault: str, finding: str) -> None:
    change_ledger(run, fault)
    report = audit(run)
    assert not report.ok
    assert any(finding in problem for problem in report.problems), report.problems


def test_a_store_in_use_can_be_audited(tmp_path: Path, group, outcomes) -> None:
    store = Store.create_or_open(tmp_path / "store", tail_bytes=5_000)
    for step in range(1, 30):
        rows = group(step)
        store.submit(Commit(tables={"experiences": rows}))
        last = store.submit(Commit(tables={"outcomes": outcomes(rows)}))
        if step % 10 == 0:
            assert audit(tmp_path).problems == []
    last.result()
    store.close()
    assert sum(row.generated for row in audit(tmp_path).rows) == 29 * 4
