"""Damage that nobody wrote: a torn ledger page, a clock that jumps. Words, never a crash."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from tests.store.disk_workload import commit, contents, expected
from trinity_data.errors import StoreError
from trinity_data.query.audit import audit
from trinity_data.schema import STORED
from trinity_data.store.ledger import LEDGER_FILE
from trinity_data.store.reader import StoreReader
from trinity_data.store.snapshot import take_snapshot
from trinity_data.store.sql import open_sql
from trinity_data.store.store import Store
from trinity_data.store.tags import tag
from trinity_data.store.types import Commit

NUM_COMMITS = 12
PAGE = 4096


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that was closed in good order."""
    root = tmp_path_factory.mktemp("whole") / "store"
    store = Store.create_or_open(root, tail_bytes=20_000)
    for number in range(NUM_COMMITS):
        commit(store, number)
    store.close()
    return root


def read(root: Path) -> None:
    reader = StoreReader(root)
    try:
        contents(reader)
    finally:
        reader.close()


def query(root: Path) -> None:
    with open_sql([root]) as session:
        assert session.query("SELECT count(*) FROM rollouts")[0].to_pylist() == [12]


def write(root: Path) -> None:
    store = Store.create_or_open(root)
    try:
        commit(store, NUM_COMMITS)
    finally:
        store.close()


def is_whole(root: Path) -> bool:
    reader = StoreReader(root)
    try:
        return contents(reader) == expected(NUM_COMMITS)
    finally:
        reader.close()


def tear(path: Path, page: int) -> bool:
    """The second half of the page never reached the disk; False when it was empty anyhow."""
    with path.open("r+b") as file:
        file.seek(page * PAGE + PAGE // 2)
        before = file.read(PAGE // 2)
        file.seek(page * PAGE + PAGE // 2)
        file.write(bytes(PAGE // 2))
    return before != bytes(PAGE // 2)


def test_a_torn_ledger_page_is_named_by_the_audit_and_nothing_ends_in_a_crash(
    whole: Path, tmp_path: Path
) -> None:
    root, torn, readable = tmp_path / "store", 0, 0
    assert audit(whole).problems == []
    for page in range((whole / LEDGER_FILE).stat().st_size // PAGE):
        for use in (query, write) if page % 2 else (query, read):
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(whole, root)
            changed = tear(root / LEDGER_FILE, page)
            try:
                if use is query:
                    # what a page held before may still lie in its unused part
                    assert not changed or named_by_audit(root) or is_whole(root), f"page {page} of the ledger"
                use(root)
            except StoreError as error:
                assert "ledger" in str(error), error
            else:
                readable += changed and use is query
        torn += changed
    assert torn > 10
    # the rows are not in the ledger: what does not hold the list of files leaves them open to SQL
    assert readable >= torn - 3


def named_by_audit(root: Path) -> bool:
    try:
        return any(LEDGER_FILE in problem for problem in audit(root).problems)
    except StoreError as error:
        return LEDGER_FILE in str(error)


def test_a_clock_that_jumps_back_changes_neither_the_order_nor_the_past(store: Store, group) -> None:
    names = STORED["experiences"].names
    for position, day in enumerate((30, 2, 15)):
        rows = group(position=position, size=2)
        when = pa.array([datetime(2026, 1, day, tzinfo=UTC)] * 2, pa.timestamp("us", tz="UTC"))
        rows = rows.set_column(names.index("started_at"), "started_at", when)
        store.commit(Commit(tables={"experiences": rows}, progress={"at": position}))
        if position == 1:
            tag(store.root, "two", take_snapshot(store.root).version)
    assert store.table("experiences", columns=["position"])["position"].to_pylist() == [0, 0, 1, 1, 2, 2]
    with open_sql([store.root], as_of="two") as session:
        days = session.query("SELECT day(started_at) AS day FROM rollouts")["day"].to_pylist()
    assert days == [30, 30, 2, 2]
    assert audit(store.root).problems == []
