"""A run as it was: versions, tags, and branches that share files with the run they were taken from."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from trinity_data.errors import StoreError
from trinity_data.query.audit import audit
from trinity_data.schema import rows_to_table
from trinity_data.store.branch import branch_run, link_tree
from trinity_data.store.snapshot import at_step, take_snapshot
from trinity_data.store.sql import SqlSession, open_sql
from trinity_data.store.store import Store
from trinity_data.store.tags import named_version, tag, tags
from trinity_data.store.types import Commit

Rows = Callable[..., pa.Table]
STATES = "SELECT step, state, count(*) AS n FROM experiences GROUP BY ALL ORDER BY ALL"


@pytest.fixture(params=["tails", "sealed", "sealed between"])
def run(tmp_path: Path, group: Rows, outcomes: Rows, request: pytest.FixtureRequest) -> Path:
    """Three steps of four rollouts, of which three are kept and two trained.

    The third one's next to last is failed.
    """
    job = tmp_path / "project" / "first"
    job.mkdir(parents=True)
    store = Store.create_or_open(job / "store")
    for step in (1, 2, 3):
        rows = group(step, failed=(2,) if step == 3 else ())
        judged = rows.take([0, 1, 3]) if step == 3 else rows
        store.commit(Commit(tables={"experiences": rows, "outcomes": outcomes(judged, dropped=(0,))}))
        store.form_batch("rl", step, store.pending("rl", through_step=step)[:2])
        record: dict[str, object] = {"step": step, "stage": "rl", "model_version": step}
        store.commit(
            Commit(tables={"steps": rows_to_table("steps", [record])}, progress={"explored/rl": step})
        )
        if step == 2:
            (job / "global_step_2").mkdir()
            (job / "global_step_2" / "weights").write_bytes(b"w" * 1000)
            store.record_checkpoint(2, "global_step_2", stage="rl")
            if request.param == "sealed between":
                store.seal()
    if request.param == "sealed":
        store.seal()
    store.close()
    return job


def states(run: Path) -> list[tuple[int, str, int]]:
    with open_sql([run]) as session:
        return [(row["step"], row["state"], row["n"]) for row in session.query(STATES).to_pylist()]


FIRST = [(1, "dropped", 1), (1, "pending", 1), (1, "trained", 2)]
SECOND = [(2, "dropped", 1), (2, "pending", 1), (2, "trained", 2)]


def test_a_version_shows_the_states_at_that_time(run: Path) -> None:
    version = at_step(run / "store", 1)
    with SqlSession({"run": take_snapshot(run / "store", version)}, None, "1GB", 1) as session:
        found = session.query(STATES).to_pylist()
        steps = session.query("SELECT step FROM steps")["step"].to_pylist()
    assert [(row["step"], row["state"], row["n"]) for row in found] == FIRST
    assert steps == [1]


def test_a_branch_is_the_run_as_it_was_and_its_books_are_in_order(run: Path) -> None:
    branch = branch_run(run, "second", at_step(run / "store", 2))
    # the batch of step 2 takes the row that step 1 left first
    assert states(branch.folder) == [
        (1, "dropped", 1), (1, "trained", 3), (2, "dropped", 1), (2, "pending", 2), (2, "trained", 1),
    ]  # fmt: skip
    assert audit(branch.folder).problems == []
    assert branch.num_experiences == 8


def test_a_branch_of_now_equals_the_run(run: Path) -> None:
    branch = branch_run(run, "second", take_snapshot(run / "store").version)
    assert states(branch.folder) == states(run)
    assert any(state == "failed" for _, state, _ in states(branch.folder))
    assert audit(branch.folder).problems == []


def test_a_branch_shares_the_files_that_it_needs_whole(run: Path) -> None:
    sealed = {path.stat().st_ino for path in run.rglob("*.parquet")}
    branch = branch_run(run, "second", at_step(run / "store", 2))
    weights = branch.folder / "global_step_2" / "weights"
    assert os.path.samefile(weights, run / "global_step_2" / "weights")
    shared = {path.stat().st_ino for path in branch.folder.rglob("*.parquet")} & sealed
    steps_sealed = any((run / "store" / "segments" / "state_changes").glob("*.parquet"))
    assert bool(shared) == (len(list((run / "store").rglob("*.arrows"))) > 0 and steps_sealed)
    assert branch.linked_bytes >= 1000


def test_run_and_branch_go_their_own_ways(run: Path, group: Rows) -> None:
    branch = branch_run(run, "second", at_step(run / "store", 2))
    before = states(run)
    for folder, position in ((branch.folder, 7), (run, 8)):
        store = Store.create_or_open(folder / "store")
        assert store.progress("explored/rl") == (3 if folder == run else 2)
        store.commit(Commit(tables={"experiences": group(4, position)}))
        store.seal()
        store.close()
        assert audit(folder).problems == []
    assert states(run) == [*before, (4, "raw", 4)]
    assert states(branch.folder)[-1] == (4, "raw", 4)


def test_a_branch_begins_at_the_checkpoint_and_progress_of_its_step(run: Path) -> None:
    first = branch_run(run, "one", at_step(run / "store", 1))
    second = branch_run(run, "two", at_step(run / "store", 2))
    assert (first.checkpoints, second.checkpoints) == ((), (2,))
    store = Store.create_or_open(second.folder / "store")
    found = store.latest_checkpoint()
    assert found is not None and found.step == 2
    assert store.batch(2) is not None and store.batch(3) is None
    store.close()


def test_a_tag_keeps_its_version(run: Path) -> None:
    root = run / "store"
    tag(root, "good", at_step(root, 2))
    assert tags(root) == {"good": at_step(root, 2)}
    assert named_version(root, "good") == named_version(root, "2")
    with pytest.raises(StoreError, match="has a tag 'good' already"):
        tag(root, "good", at_step(root, 1))
    with pytest.raises(StoreError, match="begins with a letter"):
        tag(root, "../x", at_step(root, 1))
    with pytest.raises(StoreError, match=r"did you mean 'good'"):
        named_version(root, "goood")


def test_a_step_without_a_batch_is_refused(run: Path) -> None:
    with pytest.raises(StoreError, match="no batch of step 4; there are those of steps 1 to 3"):
        at_step(run / "store", 4)


def test_a_branch_never_overwrites(run: Path) -> None:
    with pytest.raises(StoreError, match="exists already"):
        branch_run(run, "first", take_snapshot(run / "store").version)
    with pytest.raises(StoreError, match="a branch is a folder beside its run"):
        branch_run(run, "../elsewhere", take_snapshot(run / "store").version)
    assert [path.name for path in run.parent.iterdir()] == ["first"]


def test_a_damaged_run_is_not_branched(run: Path) -> None:
    file = next((run / "store" / "segments" / "experiences").iterdir())
    file.unlink()
    with pytest.raises(StoreError, match="damaged"):
        branch_run(run, "second", at_step(run / "store", 2))
    assert [path.name for path in run.parent.iterdir()] == ["first"]


def test_a_checkpoint_on_another_disk_is_named_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)
    checkpoint = tmp_path / "global_step_2"
    checkpoint.mkdir()
    (checkpoint / "weights").write_bytes(b"w")
    with pytest.raises(StoreError, match=r"cannot link .*global_step_2/weights: .*both must lie on one disk"):
        link_tree(checkpoint, tmp_path / "branch" / "global_step_2")
