"""Stores that somebody made to reach outside their folder, or to run code of theirs:
nothing outside is touched.
"""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from tests.store.disk_workload import commit
from trinity_data.errors import StoreError
from trinity_data.store import ledger as ledger_module
from trinity_data.store.branch import branch_run
from trinity_data.store.ledger import LEDGER_FILE, open_for_reading, transaction
from trinity_data.store.reader import StoreReader
from trinity_data.store.retention import Limits, retain
from trinity_data.store.snapshot import take_snapshot
from trinity_data.store.sql import open_sql
from trinity_data.store.store import Store

SECRET = "the only copy"


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job folder whose store has sealed rows, a tail, a checkpoint and nothing wrong."""
    job = tmp_path_factory.mktemp("whole") / "job"
    store = Store.create_or_open(job / "store")
    for number in range(6):
        commit(store, number)
    store.seal()
    commit(store, 6)
    store.close()
    (job / "global_step_1").mkdir()
    (job / "global_step_1" / "weights").write_text("w")
    return job


@pytest.fixture
def job(sealed: Path, tmp_path: Path) -> Path:
    shutil.copytree(sealed, tmp_path / "runs" / "job")
    return tmp_path / "runs" / "job"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of somebody's outside the store."""
    (tmp_path / "victim").mkdir()
    file = tmp_path / "victim" / "important.txt"
    file.write_text(SECRET)
    return file


def forge(job: Path, *statements: str) -> None:
    with closing(sqlite3.connect(job / "store" / LEDGER_FILE)) as ledger:
        for statement in statements:
            ledger.execute(statement)
        ledger.commit()


def uses(job: Path) -> list[str]:
    """What each way of using the store says; none may end otherwise than by a StoreError."""
    said = []

    def write() -> None:
        Store.create_or_open(job / "store").close()

    def read() -> None:
        with closing(StoreReader(job / "store")) as reader:
            reader.table("experiences")
            reader.latest_checkpoint()

    def query() -> None:
        with open_sql([job]) as session:
            session.query("SELECT count(*) FROM rollouts")

    def branch() -> None:
        branch_run(job, "branch", take_snapshot(job / "store").version)

    for use in (write, read, query, branch, lambda: retain(job / "store", Limits(older_than=timedelta(0)))):
        try:
            use()
        except StoreError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("kind", ["tail", "closed", "sealed"])
@pytest.mark.parametrize("climbs", [True, False])
def test_a_segment_outside_the_store_is_refused_and_left_alone(
    job: Path, victim: Path, kind: str, climbs: bool
) -> None:
    named = "../../../victim/important.txt" if climbs else str(victim)
    number = "SELECT min(segment) FROM segments WHERE table_name = 'experiences'"
    forge(job, f"UPDATE segments SET file = '{named}', kind = '{kind}' WHERE segment = ({number})")
    said = uses(job)
    assert len(said) == 5 and all("important.txt" in each and "nothing was touched" in each for each in said)
    assert [path.name for path in victim.parent.iterdir()] == ["important.txt"]
    assert victim.read_text() == SECRET and victim.stat().st_nlink == 1


@pytest.mark.parametrize(
    "change",
    [
        "file = 'segments/experiences/../../../../victim/00000001.0.parquet'",
        "file = 'segments/state_changes/00000001.0.parquet'",
        "file = 'ledger.sqlite'",
        "table_name = 'nonsense', file = 'segments/nonsense/00000001.0.parquet'",
        "file = 'segments/experiences/00000001.0.parquet' || char(10)",
        "num_bytes = -1",
        "checksum = 'text'",
    ],
)
def test_what_no_writer_writes_into_the_ledger_is_refused(job: Path, change: str) -> None:
    forge(job, f"UPDATE segments SET {change} WHERE table_name = 'experiences' AND kind = 'sealed'")
    said = uses(job)
    # who asks for a table does not see segments of one that there is not
    assert len(said) == (4 if "nonsense" in change else 5)
    assert all("the ledger" in each and "nothing was touched" in each for each in said)


@pytest.mark.parametrize("folder", ["segments", "segments/experiences"])
def test_a_folder_of_segments_that_is_a_link_is_refused_and_nothing_behind_it_is_removed(
    job: Path, victim: Path, folder: str
) -> None:
    moved = victim.parent / "moved"
    (job / "store" / folder).rename(moved)
    (job / "store" / folder).symlink_to(moved)
    (moved / "00000099.arrows").write_text(SECRET)
    said = uses(job)
    assert len(said) == 5 and all("is a link" in each for each in said)
    assert (moved / "00000099.arrows").read_text() == SECRET


def test_a_segment_that_is_a_link_is_not_followed(job: Path, victim: Path) -> None:
    for file in (job / "store" / "segments" / "experiences").iterdir():
        file.rename(victim.parent / file.name)
        file.symlink_to(victim.parent / file.name)
    before = {path.name: path.read_bytes() for path in victim.parent.iterdir()}
    with open_sql([job]) as session:
        assert session.damaged and all("does not follow links" in each for each in session.damaged)
    uses(job)
    assert {path.name: path.read_bytes() for path in victim.parent.iterdir()} == before


def test_orphans_go_only_under_names_that_a_store_gives(job: Path, victim: Path) -> None:
    folder = job / "store" / "segments" / "experiences"
    strangers = [folder / "notes.txt", folder.parent / "notes" / "00000001.arrows", folder / "1.arrows"]
    orphans = [folder / name for name in ("00000077.arrows", ".00000001-00000002.9.parquet.partial-77-1")]
    strangers[1].parent.mkdir()
    for file in (*strangers, *orphans):
        file.write_text(SECRET)
    link = folder / "00000078.2.parquet"
    link.symlink_to(victim)
    Store.create_or_open(job / "store").close()
    assert all(file.read_text() == SECRET for file in (*strangers, victim))
    assert not any(path.exists() or path.is_symlink() for path in (*orphans, link))


@pytest.mark.parametrize("path", ["../../victim", "/tmp", "global_step_1/../../../victim", "store", ""])
def test_a_checkpoint_outside_the_job_folder_is_refused(job: Path, victim: Path, path: str) -> None:
    forge(job, f"UPDATE checkpoints SET path = '{path}'")
    with pytest.raises(StoreError, match="must be global_step_N"):
        branch_run(job, "branch", take_snapshot(job / "store").version)
    with closing(StoreReader(job / "store")) as reader, pytest.raises(StoreError, match="global_step_N"):
        reader.latest_checkpoint()
    assert victim.stat().st_nlink == 1 and not (job.parent / "branch").exists()


def test_a_branch_does_not_share_what_a_link_in_a_checkpoint_points_to(job: Path, victim: Path) -> None:
    (job / "global_step_1" / "more").symlink_to(victim)
    with pytest.raises(StoreError, match="is a link"):
        branch_run(job, "branch", take_snapshot(job / "store").version)
    assert victim.stat().st_nlink == 1 and not (job.parent / "branch").exists()


@pytest.mark.parametrize(
    "statements",
    [
        ("ALTER TABLE progress RENAME TO p", "CREATE VIEW progress AS WITH RECURSIVE n(key) AS (SELECT 1 "
                                             "UNION ALL "
         "SELECT key + 1 FROM n) SELECT key, key AS value FROM n"),
        ("CREATE TRIGGER t AFTER UPDATE ON writer BEGIN DELETE FROM checkpoints; DELETE FROM progress; END",),
        ("CREATE VIEW innocent AS SELECT 1",),
        ("DROP INDEX experiences_pending",),
        ("CREATE INDEX more ON experiences (state)",),
        ("ALTER TABLE batches ADD COLUMN more",),
    ],
)  # fmt: skip
def test_a_ledger_with_another_schema_is_refused_before_anything_is_read_or_written(
    job: Path, statements: tuple[str, ...]
) -> None:
    forge(job, *statements)
    before = {path: path.read_bytes() for path in sorted((job / "store").rglob("*")) if path.is_file()}
    said = uses(job)
    assert len(said) == 5 and all("as this version makes it" in each or "lacks" in each for each in said)
    after = {path: path.read_bytes() for path in sorted((job / "store").rglob("*")) if path.is_file()}
    assert {path: after[path] for path in before} == before


def test_statistics_of_sqlite_and_a_expired_table_are_no_foreign_schema(job: Path) -> None:
    forge(job, "ANALYZE")
    retain(job / "store", Limits(older_than=timedelta(0)))
    Store.create_or_open(job / "store").close()


def test_a_reader_cannot_write_and_a_statement_has_an_end(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"
    monkeypatch.setattr(ledger_module, "MAX_SECONDS", 0.2)
    with closing(open_for_reading(job / "store")) as ledger:
        assert ledger.execute("PRAGMA query_only").fetchone() == (1,)
        assert ledger.execute("PRAGMA trusted_schema").fetchone() == (0,)
        with pytest.raises(sqlite3.OperationalError, match="interrupted"), transaction(ledger, "DEFERRED"):
            ledger.execute(endless).fetchone()
        assert ledger.execute("SELECT count(*) FROM checkpoints").fetchone() == (1,)
