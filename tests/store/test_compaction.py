"""Small sealed files are merged behind everybody's back: the rows stay what they were, the files stay few."""

from __future__ import annotations

import os
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from trinity_data.errors import StoreError
from trinity_data.query.audit import audit
from trinity_data.store import maintenance
from trinity_data.store.branch import branch_store
from trinity_data.store.maintenance import ENOUGH_BYTES, FEW, pick_for_compaction
from trinity_data.store.segments import SEALED, TAIL, Segment
from trinity_data.store.snapshot import take_snapshot
from trinity_data.store.sql import SqlSession, open_sql
from trinity_data.store.store import Store
from trinity_data.store.tags import tag
from trinity_data.store.types import Commit

MIB = 1 << 20


def segments_of_sizes(*sizes: int, kind: str = SEALED) -> list[Segment]:
    return [Segment(n, "experiences", kind, f"{n}.parquet", n, 1, size, 0) for n, size in enumerate(sizes)]


def numbers(segments: list[Segment]) -> list[int]:
    return [segment.number for segment in segments]


def test_few_small_files_are_left_alone_and_eight_are_merged() -> None:
    assert pick_for_compaction(segments_of_sizes(*[1000] * (FEW - 1))) == []
    assert numbers(pick_for_compaction(segments_of_sizes(*[1000] * FEW))) == list(range(FEW))
    # a file that outweighs all behind it waits until they have caught up
    assert numbers(pick_for_compaction(segments_of_sizes(9000, *[1000] * FEW))) == list(range(1, FEW + 1))
    assert pick_for_compaction(segments_of_sizes(*[2**n for n in range(20, 0, -1)], kind=TAIL)) == []


def test_what_makes_a_large_file_together_is_merged_and_large_ones_stay() -> None:
    assert pick_for_compaction(segments_of_sizes(*[ENOUGH_BYTES] * 20)) == []
    assert numbers(pick_for_compaction(segments_of_sizes(9 * MIB, 5 * MIB, 4 * MIB, 9 * MIB))) == [0, 1, 2]
    # in front of a large file nothing more can come
    assert numbers(pick_for_compaction(segments_of_sizes(20 * MIB, 10, 20, 20 * MIB, 30))) == [1, 2]


def test_merging_to_the_end_leaves_a_bounded_number_and_writes_a_row_a_few_times() -> None:
    held: list[Segment] = []
    most, written = 0, 0
    for number in range(3000):
        held.append(Segment(number, "state_changes", SEALED, f"{number}", number, 1, 10_000, 0))
        while merged := pick_for_compaction(held):
            at = held.index(merged[0])
            total = sum(segment.num_bytes for segment in merged)
            written += total
            held[at : at + len(merged)] = [
                Segment(
                    merged[0].number, "state_changes", SEALED, f"{number}m", merged[0].first_row, 1, total, 0
                )
            ]
        most = max(most, sum(segment.num_bytes < ENOUGH_BYTES for segment in held))
    assert most <= FEW + 11  # log2(16 MiB / 10 kB) = 10.7
    assert written < 8 * 3000 * 10_000


def fill(root: Path, group, starts: int) -> None:
    """As many starts of a run, each of which seals a little."""
    for step in range(starts):
        store = Store.create_or_open(root)
        store.commit(Commit(tables={"experiences": group(step, size=2)}, progress={"step": step}))
        store.seal()
        store.close()


def expected_rows(group, starts: int) -> pa.Table:
    return pa.concat_tables([group(step, size=2) for step in range(starts)]).replace_schema_metadata(None)


def test_a_store_that_is_opened_often_has_few_files_and_all_its_rows(tmp_path: Path, group) -> None:
    root = tmp_path / "store"
    fill(root, group, 20)
    store = Store.create_or_open(root)
    segments = store.segments()
    assert len(segments) < 12 and max(segment.num_rows for segment in segments) >= 16
    assert store.table("experiences").equals(expected_rows(group, 20))
    ids = [store.group_progress("rl", step)[1][0] for step in (19, 0, 13)]
    assert store.read(ids, columns=["step"])["step"].to_pylist() == [19, 0, 13]
    store.close()
    there = {str(p.relative_to(root)) for p in (root / "segments").rglob("*.*")}
    assert there == {segment.file for segment in segments}
    assert audit(root).problems == []


def test_readers_of_an_older_snapshot_go_on(tmp_path: Path, group, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "store"
    fill(root, group, FEW - 1)
    tag(root, "early", take_snapshot(root).version)
    snapshot = take_snapshot(root)
    with open_sql([root]) as session, open_sql([root], as_of="early") as early:
        steps = pa.table({"step": [0, FEW - 2, FEW - 1]})
        session.register("asked", steps)
        fill_more(root, group)
        assert not any(file.exists() for file in snapshot.sealed["experiences"])
        # the version is still the old one: what was added by then does not show
        asked = "SELECT count(*) AS n, max(step) AS last FROM rollouts"
        assert session.query(asked).to_pylist() == [{"n": 2 * FEW - 2, "last": FEW - 2}]
        assert session.query("SELECT count(*) FROM rollouts JOIN asked USING (step)")[0].to_pylist() == [4]
        assert early.query(asked).to_pylist() == [{"n": 2 * FEW - 2, "last": FEW - 2}]
    with SqlSession({"old": snapshot}, None, "1GB", 1) as old:
        assert old.query(asked).to_pylist() == [{"n": 2 * FEW - 2, "last": FEW - 2}]
    assert snapshot.verified().damaged == []
    assert branch_store(root, tmp_path / "branched", snapshot.version).num_rows == 2 * FEW - 2


def test_files_that_are_merged_again_while_they_are_looked_for_are_looked_for_again(
    tmp_path: Path, group, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "store"
    fill(root, group, FEW - 1)
    connect = SqlSession._connect

    def merging(session: SqlSession) -> duckdb.DuckDBPyConnection:
        monkeypatch.undo()
        (renewed,) = session._snapshots.values()
        step = FEW
        while all(file.exists() for file in renewed.sealed["experiences"]):
            fill_more(root, group, step := step + 1)
        return connect(session)

    with open_sql([root]) as session:
        fill_more(root, group)
        monkeypatch.setattr(SqlSession, "_connect", merging)
        assert session.query("SELECT count(*) AS n FROM rollouts").to_pylist() == [{"n": 2 * FEW - 2}]


def fill_more(root: Path, group, step: int = FEW - 1) -> None:
    store = Store.create_or_open(root)
    store.commit(Commit(tables={"experiences": group(step, size=2)}))
    store.seal()
    store.close()


def test_a_file_that_is_gone_for_good_is_still_named(tmp_path: Path, group) -> None:
    root = tmp_path / "store"
    fill(root, group, 2)
    snapshot = take_snapshot(root)
    gone, _ = snapshot.sealed["experiences"]
    os.unlink(gone)
    named = f"{gone.name} is damaged: the file is gone; rows 0 to 1"
    assert snapshot.misses_files() and any(named in problem for problem in snapshot.verified().damaged)
    with pytest.raises(StoreError, match=named):
        SqlSession({"old": snapshot}, None, "1GB", 1).query("SELECT avg(reward) FROM rollouts")


def test_a_damaged_file_is_never_merged_into_a_whole_one(tmp_path: Path, group, caplog) -> None:
    root = tmp_path / "store"
    fill(root, group, FEW - 1)
    bad = take_snapshot(root).sealed["experiences"][2]
    content = bytearray(bad.read_bytes())
    content[len(content) // 2] ^= 0xFF
    bad.write_bytes(content)
    fill_more(root, group)
    assert f"{bad.name} is damaged" in caplog.text
    assert bad.read_bytes() == content
    assert [problem for problem in audit(root).problems if bad.name in problem]
    with open_sql([root], verify=True) as session:
        assert session.query("SELECT count(*) FROM rollouts")[0].to_pylist() == [2 * FEW - 2]
        assert len(session.damaged) == 1


def test_a_merge_that_another_has_overtaken_is_refused(tmp_path: Path, group) -> None:
    root = tmp_path / "store"
    fill(root, group, 3)
    store = Store.create_or_open(root)
    first, second, third = store.segments()
    merged, _ = maintenance.merge(root, [first, second])
    changed = Segment(**vars(second) | {"file": "elsewhere.parquet"})
    with pytest.raises(StoreError, match="have changed meanwhile"):
        store._writer.submit(lambda changes: maintenance.swap(changes, [first, changed], merged)).result()
    assert store.segments() == [first, second, third]
    store.close()
