"""Contents that nobody needs go from the disk.

Rows, states and everything that a resume, a tag or a branch needs stay.
"""

from __future__ import annotations

import shutil
import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from trinity_data.errors import StoreError
from trinity_data.query.audit import audit
from trinity_data.query.lineage import Lineage
from trinity_data.schema import STORED
from trinity_data.store import retention
from trinity_data.store.branch import branch_store
from trinity_data.store.maintenance import FEW
from trinity_data.store.reader import StoreReader
from trinity_data.store.retention import CONTENTS, Limits, Retention, retain
from trinity_data.store.segments import SEALED
from trinity_data.store.snapshot import at_step, take_snapshot
from trinity_data.store.sql import open_sql
from trinity_data.store.store import Store
from trinity_data.store.tags import tag
from trinity_data.store.types import Commit

START = datetime(2026, 3, 1, tzinfo=UTC)
NOW = START + timedelta(days=10)
OLD = Limits(older_than=timedelta(days=1))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Where the run below was made, once it was."""
    return [tmp_path_factory.mktemp("made") / "job"]


@pytest.fixture
def root(tmp_path: Path, made: list[Path], group, outcomes) -> Path:
    """Steps 1 to 5, a day and a file each: of four rows two are trained, one dropped, one stale.

    The checkpoint is at step 3. The rows of step 6 are a day younger and wait.
    """
    if not made[0].exists():
        make(made[0], group, outcomes)
    shutil.copytree(made[0], tmp_path / "job")
    return tmp_path / "job" / "store"


def make(job: Path, group, outcomes) -> None:
    for step in range(1, 7):
        store = Store.create_or_open(job / "store")
        rows = dated(group(step, size=4), START + timedelta(days=step))
        ids = rows["experience_id"].to_pylist()
        store.commit(Commit(tables={"experiences": rows, "outcomes": outcomes(rows, dropped=(2,))}))
        if step < 6:
            store.form_batch("rl", step, ids[:2])
            store.commit(Commit(states=[(ids[3], "stale")]))
        if step == 3:
            (job / "global_step_3").mkdir()
            store.record_checkpoint(3, "global_step_3", stage="rl")
        store.seal()
        store.close()


def dated(rows: pa.Table, when: datetime | None) -> pa.Table:
    at = rows.schema.get_field_index("started_at")
    return rows.set_column(at, "started_at", pa.array([when] * rows.num_rows, pa.timestamp("us", tz="UTC")))


def reasons(found: Retention) -> list[str]:
    return [kept.why for kept in found.kept]


def ids(step: int) -> list[str]:
    return [f"explorer/rl/{step:07d}/00000/{n:03d}/00" for n in range(4)]


def query(root: Path, sql: str, **options: str) -> list[dict[str, object]]:
    with open_sql([root], **options) as session:
        return session.query(sql).to_pylist()


def test_what_is_old_and_done_with_goes_and_the_rest_stays(root: Path) -> None:
    before = query(root, "SELECT * EXCLUDE (response_text) FROM experiences ORDER BY experience_id")
    found = retain(root, OLD, now=NOW)
    assert (found.num_rows, found.num_files) == (12, 3) and found.freed_bytes > 0
    replay = "has rows of batches after the newest checkpoint, which a resume trains again"
    assert reasons(found) == [replay, replay, "has rows that wait for their operators or a batch"]
    rows = query(root, "SELECT * EXCLUDE (response_text) FROM experiences ORDER BY experience_id")
    for was, now in zip(before, rows, strict=True):
        for name in ("token_ids", "logprobs", "action_mask", "messages", "tools"):
            kept = was.pop(name)
            assert now.pop(name) == (kept if was["step"] > 3 else None)
        assert was == now
    assert {row["step"] for row in query(root, "SELECT DISTINCT step FROM tokens")} == {4, 5, 6}
    files = {str(path.relative_to(root)) for path in (root / "segments").rglob("*.*")}
    reader = StoreReader(root)
    assert files == {segment.file for segment in reader.segments()}
    reader.close()


def test_the_counts_of_states_add_up_and_say_how_many_rows_lost_their_contents(root: Path) -> None:
    before = audit(root)
    retain(root, OLD, now=NOW)
    after = audit(root)
    assert after.problems == before.problems == [] and after.rows == before.rows
    assert sum(lost.num_rows for lost in after.expired) == 12 and before.expired == []
    ledger = sqlite3.connect(root / "ledger.sqlite")
    ledger.execute("UPDATE experiences SET state = 'pending' WHERE experience_id = ?", (ids(1)[0],))
    ledger.commit()
    ledger.close()
    wrong = "the contents of an experience were expired before it was done with"
    assert any(wrong in problem for problem in audit(root).problems)


def test_contents_are_never_given_as_null(root: Path) -> None:
    retain(root, OLD, now=NOW)
    reader = StoreReader(root)
    lost = (
        f"'{ids(2)[1]}' has no logprobs, token_ids any more: its contents were expired at 2026-03-11T00:00:00"
    )
    with pytest.raises(StoreError, match=lost):
        reader.read([ids(5)[0], ids(2)[1]], columns=["token_ids", "logprobs", "step"])
    with pytest.raises(StoreError, match="were expired at"):
        reader.read([ids(1)[0]])
    assert reader.read([ids(2)[1], ids(5)[0]], columns=["step", "reward"])["step"].to_pylist() == [2, 5]
    assert reader.read(ids(5)[:2])["token_ids"].to_pylist()[0] == [10, 11, 20, 30, 40]
    reader.close()
    with Lineage(root.parent) as lineage:
        assert lineage.experience(ids(2)[1]).expired_at == "2026-03-11T00:00:00+00:00"
        assert lineage.experience(ids(5)[1]).expired_at is None


def test_expiring_twice_and_going_on_changes_nothing_more(root: Path, group) -> None:
    retain(root, OLD, now=NOW)
    again = retain(root, OLD, now=NOW)
    assert again.num_files == 0 and reasons(again)[:3] == ["was expired before"] * 3
    for step in range(7, 7 + FEW):
        store = Store.create_or_open(root)
        store.commit(Commit(tables={"experiences": group(step)}))
        store.seal()
        store.close()
    store = Store.create_or_open(root)
    assert sum(lost.num_rows for lost in store.expired()) == 12
    assert store.read([ids(4)[0], ids(9)[0]])["prompt_length"].to_pylist() == [2, 2]
    # what has its contents and what has not are not merged
    with pytest.raises(StoreError, match="were expired at"):
        store.read([ids(3)[0]])
    store.close()
    assert audit(root).problems == []


def test_a_dry_run_writes_nothing(root: Path) -> None:
    files = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    found = retain(root, OLD, now=NOW, dry_run=True)
    assert (found.num_rows, found.num_files) == (12, 3)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == files


def test_the_oldest_go_until_the_size_fits(root: Path) -> None:
    store = StoreReader(root)
    files = [segment for segment in store.segments() if segment.table == "experiences"]
    total = sum(segment.num_bytes for segment in store.segments())
    store.close()
    planned = retain(root, Limits(max_bytes=total - files[0].num_bytes - 1), dry_run=True)
    assert planned.num_files == 2 and reasons(planned)[0] == "fits into the size"
    assert retain(root, Limits(max_bytes=total)).num_files == 0
    found = retain(root, Limits(max_bytes=total - 1))
    assert found.num_files == 1 and found.left_bytes == total - found.freed_bytes
    assert retain(root, Limits(max_bytes=0)).num_files == 2


def test_what_a_tag_shows_stays_unless_other_tags_are_named(root: Path) -> None:
    tag(root, "two", at_step(root, 2))
    tag(root, "one", at_step(root, 1))
    found = retain(root, OLD, now=NOW, dry_run=True)
    assert found.num_files == 1 and reasons(found)[:2] == ["is shown by tag 'one'", "is shown by tag 'two'"]
    one = Limits(older_than=OLD.older_than, keep_tags=["one"])
    assert retain(root, one, now=NOW).num_files == 2
    with pytest.raises(StoreError, match=r"unknown tag 'on'; known: one, two.*nothing was expired"):
        retain(root, Limits(max_bytes=0, keep_tags=["on"]))
    assert query(root, "SELECT count(token_ids) AS n FROM rollouts", as_of="one") == [{"n": 4}]
    assert query(root, "SELECT count(*) AS n FROM rollouts", as_of="two") == [{"n": 8}]


def test_a_branch_keeps_its_contents_and_one_made_later_knows_what_it_lacks(
    root: Path, tmp_path: Path
) -> None:
    version = take_snapshot(root).version
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
    branch_store(root, tmp_path / "before" / "store", version)
    retain(root, OLD, now=NOW)
    branch_store(root, tmp_path / "after" / "store", version)
    assert query(tmp_path / "before", "SELECT count(token_ids) AS n FROM rollouts") == [{"n": 24}]
    assert audit(tmp_path / "before").expired == []
    report = audit(tmp_path / "after")
    assert report.problems == [] and sum(lost.num_rows for lost in report.expired) == 12
    # at the end of step 2 no checkpoint held the two batches, and one row waited still
    with pytest.raises(StoreError, match=r"need the contents of 5 experiences .*branch off a later step"):
        branch_store(root, tmp_path / "after" / "early", at_step(root, 2))
    assert not (tmp_path / "after" / "early").exists()


def test_without_a_checkpoint_on_disk_every_batch_would_be_trained_again(root: Path) -> None:
    shutil.rmtree(root.parent / "global_step_3")
    found = retain(root, OLD, now=NOW)
    assert found.num_files == 0
    assert sum("which a resume trains again" in why for why in reasons(found)) == 5


def test_rows_of_the_future_and_of_no_time_are_not_old(root: Path, group) -> None:
    """A clock that jumped back: what was made before looks as if it were to come."""
    assert retain(root, OLD, now=START - timedelta(days=400)).num_files == 0
    store = Store.create_or_open(root)
    store.commit(
        Commit(tables={"experiences": dated(group(9), None)}, states=[(name, "stale") for name in ids(9)])
    )
    store.seal()
    store.close()
    found = retain(root, OLD, now=NOW, dry_run=True)
    assert reasons(found)[-1] == "has rows that do not say when they were made"


def test_a_run_goes_on_while_its_rows_are_expired(root: Path, group) -> None:
    store = Store.create_or_open(root)
    with open_sql([root]) as session:
        assert retain(root, OLD, now=NOW).num_files == 3
        store.commit(Commit(tables={"experiences": group(8)}))
        assert session.query("SELECT count(*) AS n FROM rollouts").to_pylist() == [{"n": 24}]
    assert store.table("experiences").num_rows == 28
    store.close()
    assert audit(root).problems == []


def test_a_start_or_a_merge_in_between_is_refused_and_nothing_is_lost(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = retention.write_sealed

    def started_meanwhile(*arguments: object, **options: object) -> object:
        written = write(*arguments, **options)
        Store.create_or_open(root).close()  # collects what the ledger does not name
        return written

    monkeypatch.setattr(retention, "write_sealed", started_meanwhile)
    with pytest.raises(StoreError, match=r"changed while it was expired: .*the run was started; try again"):
        retain(root, OLD, now=NOW)
    assert query(root, "SELECT count(token_ids) AS n FROM rollouts") == [{"n": 24}]
    assert audit(root).expired == [] and audit(root).problems == []


def test_a_damaged_file_is_not_rewritten(root: Path) -> None:
    reader = StoreReader(root)
    bad = next(s for s in reader.segments() if s.table == "experiences" and s.kind == SEALED)
    reader.close()
    content = bytearray((root / bad.file).read_bytes())
    content[len(content) // 3] ^= 1
    (root / bad.file).write_bytes(content)
    with pytest.raises(StoreError, match=f"{Path(bad.file).name} is damaged"):
        retain(root, OLD, now=NOW)
    assert (root / bad.file).read_bytes() == content


def test_the_contents_are_columns_of_experiences() -> None:
    assert set(CONTENTS) <= set(STORED["experiences"].names)


def test_limits_must_say_something(root: Path) -> None:
    with pytest.raises(StoreError, match="give an age, a size, or both"):
        retain(root, Limits())
