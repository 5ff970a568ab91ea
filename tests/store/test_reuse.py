"""A row may be in two batches only where replay was asked for, and everything still adds up."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_data.errors import StoreError
from trinity_data.query.audit import audit
from trinity_data.schema import rows_to_table
from trinity_data.store.branch import branch_store
from trinity_data.store.index import Candidate
from trinity_data.store.snapshot import take_snapshot
from trinity_data.store.sql import open_sql
from trinity_data.store.store import Store
from trinity_data.store.types import Commit, State


def train(store: Store, step: int, ids: list[str], *, replay: bool) -> None:
    store.form_batch("rl", step, ids, replay=replay)
    rows = [
        {"step": step, "stage": "rl", "position": n, "experience_id": row, "logprobs": [float(-step)] * 3}
        for n, row in enumerate(ids)
    ]  # fmt: skip
    store.commit(Commit(tables={"batches": rows_to_table("batches", rows)}))


@pytest.fixture
def ids(store: Store, group, outcomes) -> list[str]:
    """Four rows that wait."""
    rows = group(1)
    store.commit(Commit(tables={"experiences": rows, "outcomes": outcomes(rows)}))
    return list(rows["experience_id"].to_pylist())


def test_a_trained_row_is_refused_without_replay(store: Store, ids: list[str]) -> None:
    store.form_batch("rl", 1, ids[:2])
    with pytest.raises(StoreError, match="is trained; the batch of step 2 may take only pending ones"):
        store.form_batch("rl", 2, ids[1:3])
    assert store.batch(2) is None


def test_replay_takes_no_row_that_was_dropped(store: Store, ids: list[str]) -> None:
    store.commit(Commit(states=[(ids[0], State.DROPPED)]))
    with pytest.raises(StoreError, match="is dropped; the batch of step 1 may take only pending and trained"):
        store.form_batch("rl", 1, ids, replay=True)


def test_a_replayed_row_counts_once_and_has_a_row_for_each_use(store: Store, ids: list[str]) -> None:
    train(store, 1, ids[:2], replay=True)
    train(store, 2, [ids[2], ids[0]], replay=True)
    train(store, 3, [ids[0], ids[2]], replay=True)
    assert store.counts()[State.TRAINED] == 3 and store.counts()[State.PENDING] == 1
    assert store.batch(2) == [ids[2], ids[0]]
    uses = {row.experience_id: (row.uses, row.last_step) for row in candidates(store)}
    assert uses == {ids[0]: (3, 3), ids[1]: (1, 1), ids[2]: (2, 3), ids[3]: (0, None)}
    report = audit(store.root)
    assert report.problems == []
    (row,) = report.rows
    assert (row.generated, row.states[State.TRAINED], row.states[State.PENDING], row.unexplained) == (
        4,
        3,
        1,
        0,
    )
    with open_sql([store.root]) as session:
        found = session.query(
            "SELECT trained_step, uses, state FROM experiences ORDER BY rollout"
        ).to_pylist()
        assert [tuple(row.values()) for row in found] == [
            (1, 3, "trained"), (1, 1, "trained"), (2, 2, "trained"), (None, 0, "pending"),
        ]  # fmt: skip
        tokens = session.query("SELECT count(*) AS n, min(recomputed_logprob) AS lowest FROM tokens")
        # a token stays one row, with what the trainer found when it first met it
        assert tokens.to_pylist() == [{"n": 12, "lowest": -2.0}]
        assert session.query("FROM batches").num_rows == 6


def test_an_audit_without_replay_finds_the_second_use(store: Store, ids: list[str]) -> None:
    train(store, 1, ids[:2], replay=True)
    train(store, 2, [ids[0]], replay=True)
    assert audit(store.root).ok
    store._writing_ledger.execute("DELETE FROM progress WHERE key = 'replay/rl'")
    assert audit(store.root).problems == [f"an experience is in two batches: {ids[0]} in steps 1, 2"]


def test_only_the_newest_used_rows_are_looked_at(store: Store, ids: list[str], group, outcomes) -> None:
    later = group(2)
    store.commit(Commit(tables={"experiences": later, "outcomes": outcomes(later)}))
    train(store, 1, ids, replay=True)
    train(store, 2, later["experience_id"].to_pylist()[:3], replay=True)
    assert [row.uses for row in store.candidates("rl", through_step=2, num_used=2)] == [0, 1, 1]
    assert {row.step for row in store.candidates("rl", through_step=2, num_used=2)} == {2}
    assert len(store.candidates("rl", through_step=1, num_used=9)) == 4


def test_a_branch_remembers_the_uses(store: Store, ids: list[str], tmp_path: Path) -> None:
    train(store, 1, ids[:2], replay=True)
    train(store, 2, [ids[0]], replay=True)
    branch_store(store.root, tmp_path / "branch", take_snapshot(store.root).version)
    branch = Store.create_or_open(tmp_path / "branch")
    assert candidates(branch) == candidates(store)
    assert audit(tmp_path / "branch").problems == []
    branch.close()


def candidates(store: Store) -> list[Candidate]:
    return store.candidates("rl", through_step=9, num_used=99)
