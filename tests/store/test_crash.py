"""What is acknowledged survives a kill, a torn tail and damaged files.

What is not acknowledged is gone or whole.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tests.forked import fork
from tests.store.crash_writer import write
from trinity_data.errors import StoreError
from trinity_data.query.audit import audit
from trinity_data.store.store import Store
from trinity_data.store.types import Commit, State


def run_until_killed(root: Path, seconds: float) -> set[tuple[str, int]]:
    """What the writer acknowledged before it was killed, so long after it opened the store: (kind, step)."""
    output, pid = fork(partial(write, root))
    with output:
        assert output.readline() == "open\n"
        killer = threading.Timer(seconds, os.kill, (pid, signal.SIGKILL))
        killer.start()
        lines = [line.split() for line in output if line.endswith("\n")]
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    return {(kind, int(step)) for kind, step in lines}


def check_against(store: Store, acknowledged: set[tuple[str, int]], kills: int) -> None:
    """Everything acknowledged is there whole; beyond it there is at most one commit a kill, whole as well."""
    ids = store.table("experiences", columns=["experience_id"])["experience_id"]
    assert len(pc.unique(ids)) == len(ids)
    rows = Counter(store.table("experiences", columns=["step"])["step"].to_pylist())
    outcomes = Counter(store.table("outcomes", columns=["step"])["step"].to_pylist())
    batches = {step for step in rows if store.batch(step) is not None}
    assert set(rows.values()) <= {4} and set(outcomes.values()) <= {3}
    found = {("rows", step) for step in rows} | {("outcomes", step) for step in outcomes}
    found |= {("batch", step) for step in batches}
    assert acknowledged - found == set()
    assert len(found - acknowledged) <= kills
    for step in batches:
        assert store.batch(step) == [f"explorer/rl/{step:07d}/00000/{n:03d}/00" for n in range(2)]
    assert store.progress("step") == max(rows, default=None)
    assert store.counts()[State.TRAINED] == 2 * len(batches)


def test_a_killed_writer_loses_nothing_it_acknowledged_and_doubles_nothing(tmp_path: Path) -> None:
    root, chance = tmp_path / "store", random.Random(7)
    acknowledged: set[tuple[str, int]] = set()
    for kills in range(1, 11):
        acknowledged |= run_until_killed(root, chance.uniform(0.05, 0.6))
        store = Store.create_or_open(root, tail_bytes=30_000)
        check_against(store, acknowledged, kills)
        store.close()
    assert len(acknowledged) > 20
    report = audit(root)
    assert report.problems == []
    assert {row.generated for row in report.rows} == {4}
    assert {("rows", row.step) for row in report.rows} >= {one for one in acknowledged if one[0] == "rows"}


def test_a_torn_tail_is_cut(tmp_path: Path, group) -> None:
    store = Store.create_or_open(tmp_path / "store")
    store.commit(Commit(tables={"experiences": group(position=0)}))
    (segment,) = store.segments()
    store.close()
    tail = tmp_path / "store" / segment.file
    with tail.open("r+b") as file:
        file.truncate(segment.num_bytes)
        file.seek(0, os.SEEK_END)
        file.write(b"half of a record batch that the ledger never heard of")

    again = Store.create_or_open(tmp_path / "store")
    assert tail.stat().st_size == segment.num_bytes
    again.commit(Commit(tables={"experiences": group(position=1)}))
    assert again.table("experiences").equals(
        pa.concat_tables([group(position=0), group(position=1)]).replace_schema_metadata(None)
    )
    again.close()


def test_files_that_the_ledger_does_not_know_are_removed(tmp_path: Path, group) -> None:
    store = Store.create_or_open(tmp_path / "store")
    store.commit(Commit(tables={"experiences": group()}))
    store.close()
    folder = tmp_path / "store" / "segments" / "experiences"
    for name in ("00000009.arrows", "00000009.1.parquet", ".00000001.1.parquet.partial-9-1"):
        (folder / name).write_bytes(b"left by a crash")
    again = Store.create_or_open(tmp_path / "store")
    assert [path.name for path in folder.iterdir()] == ["00000001.arrows"]
    assert again.counts()[State.RAW] == 4
    again.close()


@pytest.mark.parametrize("fault", ["flip", "cut", "gone"])
@pytest.mark.parametrize("kind", ["tail", "sealed"])
def test_a_damaged_segment_is_named_and_the_others_stay_readable(
    tmp_path: Path, group, fault: str, kind: str
) -> None:
    store = Store.create_or_open(tmp_path / "store", tail_bytes=1000)
    store.commit(Commit(tables={"experiences": group(position=0, size=40)}))
    store.close()
    store = Store.create_or_open(tmp_path / "store", tail_bytes=1_000_000)
    store.commit(Commit(tables={"experiences": group(position=1, size=40)}))
    store.close()
    bad = next(segment for segment in store_segments(tmp_path) if segment.kind == kind)
    path = tmp_path / "store" / bad.file
    if fault == "gone":
        path.unlink()
    elif fault == "cut":
        os.truncate(path, bad.num_bytes - 100)
    else:
        flip_a_byte(path, bad.num_bytes // 3)

    again = Store.create_or_open(tmp_path / "store")
    good, lost = (0, 1) if kind == "tail" else (1, 0)
    assert again.read(group(position=good)["experience_id"].to_pylist()).num_rows == 4
    with pytest.raises(StoreError, match=f"{Path(bad.file).name} is damaged: .*rows {bad.first_row} to"):
        again.read(group(position=lost, size=40)["experience_id"].to_pylist())
    again.commit(Commit(tables={"experiences": group(position=2)}))
    assert again.counts()[State.RAW] == 84
    again.close()
    assert any(Path(bad.file).name in problem for problem in audit(tmp_path / "store").problems)


def store_segments(tmp_path: Path) -> list:
    store = Store.create_or_open(tmp_path / "store")
    segments = store.segments()
    store.close()
    return segments


def flip_a_byte(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0xFF]))


def test_a_full_disk_refuses_the_commit_and_the_next_one_goes_through(
    store: Store, group, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit(Commit(tables={"experiences": group(position=0)}))
    write = os.pwrite

    def no_space(descriptor: int, content: bytes, offset: int) -> int:
        write(descriptor, content[: len(content) // 2], offset)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", no_space)
    with pytest.raises(StoreError, match="No space left on device; nothing of this commit is stored"):
        store.commit(Commit(tables={"experiences": group(position=1)}, progress={"at": 1}))
    monkeypatch.undo()
    assert store.progress("at") is None
    store.commit(Commit(tables={"experiences": group(position=1)}))
    assert store.table("experiences").num_rows == 8


def test_a_failed_sync_is_not_acknowledged(store: Store, group, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", broken)
    with pytest.raises(StoreError, match="Input/output error"):
        store.commit(Commit(tables={"experiences": group()}))
    monkeypatch.undo()
    assert store.counts()[State.RAW] == 0
    store.commit(Commit(tables={"experiences": group()}))
    assert store.counts()[State.RAW] == 4


def test_rows_can_be_read_while_they_are_sealed(tmp_path: Path, group) -> None:
    store = Store.create_or_open(tmp_path / "store", tail_bytes=10_000)
    wrong: list[str] = []
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            rows = store.table("experiences", columns=["step", "rollout"])
            expected = [(step, n) for step in range(rows.num_rows // 8) for n in range(8)]
            if list(zip(*rows.to_pydict().values(), strict=True)) != expected:
                wrong.append(f"{rows.num_rows} rows")

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for step in range(30):
        store.commit(Commit(tables={"experiences": group(step, size=8)}))
    store.seal()
    time.sleep(0.05)
    ended.set()
    for reader in readers:
        reader.join()
    assert wrong == []
    store.close()
    segments = store_segments(tmp_path)
    assert {segment.kind for segment in segments} == {"sealed"}
    files = list((tmp_path / "store" / "segments").rglob("*.*"))
    assert {str(file.relative_to(tmp_path / "store")) for file in files} == {s.file for s in segments}


def test_sealed_rows_are_plain_parquet(store: Store, group) -> None:
    rows = group(size=16)
    store.commit(Commit(tables={"experiences": rows}))
    store.seal()
    (segment,) = store.segments()
    read = pq.read_table(store.root / segment.file)
    assert read.select(rows.column_names).equals(rows)
    assert pq.ParquetFile(store.root / segment.file).metadata.row_group(0).column(0).compression == "ZSTD"
