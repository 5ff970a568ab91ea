"""The power may go at any call: the store opens again, with every acknowledged commit
and at most the one under way.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.store.disk import ACKNOWLEDGED, SYNC, Call, Disk, build_shim, read_log
from tests.store.disk_workload import TAIL_BYTES, commit, contents, expected
from trinity_data.query.audit import audit
from trinity_data.store.store import Store

ROOT = Path(__file__).parents[2]


def record(place: Path, starts: int, commits_per_start: int) -> tuple[Path, list[Call]]:
    """The folder that a workload was watched in, and every call that changed it."""
    folder, log = place / "watched", place / "calls"
    folder.mkdir()
    environment = os.environ | {"LD_PRELOAD": str(build_shim(place))}
    command = [sys.executable, "-m", "tests.store.disk_workload", str(folder), str(log)]
    subprocess.run(
        [*command, str(starts), str(commits_per_start)], env=environment, cwd=ROOT, check=True, timeout=120
    )
    return folder, list(read_log(log))


def check(place: Path, acknowledged: int, *, audited: bool = False) -> None:
    """What is left is the acknowledged commits and at most one more, and the store goes on from there."""
    root = place / "job" / "store"
    store = Store.create_or_open(root, tail_bytes=TAIL_BYTES)
    found = contents(store)
    held = next((n for n in (acknowledged, acknowledged + 1) if found == expected(n)), None)
    assert held is not None, f"{found} is neither {acknowledged} commits nor one more"
    if audited:
        commit(store, held)
        assert contents(store) == expected(held + 1)
    store.close()
    if audited:
        assert audit(root).problems == []


def files_below(folder: Path) -> dict[Path, bytes]:
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_what_is_durable_at_each_sync_is_every_acknowledged_commit(tmp_path: Path) -> None:
    folder, calls = record(tmp_path, 2, 4)
    disk, checked = Disk(folder), 0
    for call in calls:
        disk.apply(call)
        if call.op == SYNC:
            checked += 1
            disk.write_to(tmp_path / "left", None)
            check(tmp_path / "left", len(disk.acknowledged), audited=checked % 16 == 0)
    assert disk.acknowledged == [str(number) for number in range(8)] and checked > 40
    # the log misses no change: replayed to its end it gives every file that is really there
    there = files_below(folder)
    del there[Path(ACKNOWLEDGED)]
    disk.write_to(tmp_path / "left", None)
    assert files_below(tmp_path / "left").items() >= there.items()


@pytest.mark.slow
def test_whatever_part_of_the_unsynced_is_left_after_each_call_the_store_opens(tmp_path: Path) -> None:
    folder, calls = record(tmp_path, 3, 10)
    disk, chance = Disk(folder), random.Random(1)
    for number, call in enumerate(calls):
        disk.apply(call)
        disk.write_to(tmp_path / "left", chance)
        check(tmp_path / "left", len(disk.acknowledged), audited=number % 50 == 0)
    print(f"power cut after each of {len(calls)} calls, {len(disk.acknowledged)} commits: none lost")
    assert len(disk.acknowledged) == 30


def test_a_store_whose_folders_were_never_synced_would_be_lost(tmp_path: Path) -> None:
    """The check can fail: without the syncs of folders, the durable disk holds nothing
    of what was acknowledged.
    """
    folder, calls = record(tmp_path, 1, 2)
    disk, folders = Disk(folder), set()
    for call in calls:
        if call.path and Path(call.path).is_dir():
            folders.add(call.descriptor)
        elif call.path:
            folders.discard(call.descriptor)
        if call.op != SYNC or call.descriptor not in folders:
            disk.apply(call)
    disk.write_to(tmp_path / "left", None)
    assert len(disk.acknowledged) == 2
    assert files_below(tmp_path / "left") == {}
