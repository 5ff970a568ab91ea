"""Runs the workload again and again on a disk that fails at one call after another,
and prints what became of each.

Run by test_disk_faults.py with `disk.c` preloaded. A line of the output is one JSON object.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from pathlib import Path

from tests.store import disk
from tests.store.disk_workload import contents, expected, run
from trinity_data.errors import TrinityError
from trinity_data.schema import rows_to_table
from trinity_data.store.store import Store

STARTS, COMMITS = 2, 4
OPS = {"write": disk.WRITE, "sync": disk.SYNC, "open": disk.OPEN}


def attempt(folder: Path, op: int, countdown: int, error: int, *, sticky: bool) -> dict[str, object]:
    """One run with one fault: who was told, and whether what was acknowledged is there afterwards."""
    shim = disk.preloaded()
    # a name of its own, because SQLite closes files of a failed start by their name,
    # whenever Python lets go of them
    root = folder / f"job-{countdown}" / "store"
    acknowledged: list[int] = []
    told = foreign = ""
    shim.disk_fail(op, countdown, error, int(sticky))
    try:
        run(root, acknowledged.append, starts=STARTS, commits_per_start=COMMITS)
    except TrinityError as failure:
        told = str(failure)
    except Exception as failure:  # what the test is after: an error that no person is meant to read
        foreign = repr(failure)
    matched = shim.disk_matched()
    shim.disk_fail(0, 0, 0, 0)
    store = Store.create_or_open(root)
    found, number = contents(store), len(acknowledged)
    store.close()
    shutil.rmtree(root.parent)
    whole = found in (expected(number), expected(number + 1))
    return {"countdown": countdown, "matched": matched, "acknowledged": number, "told": told,
     "foreign": foreign, "whole": whole}  # fmt: skip


def main(folder: Path, op: str, error: str, every: int, sticky: bool) -> None:
    """Fails the first call, then the one `every` calls later,
    until the workload has fewer calls than that.
    """
    rows_to_table("experiences", [])
    folder.mkdir()
    disk.preloaded().disk_watch(os.fsencode(folder), None)
    countdown = 1
    while True:
        found = attempt(folder, OPS[op], countdown, getattr(errno, error), sticky=sticky)
        if found["matched"] < countdown:
            break
        print(json.dumps(found), flush=True)
        countdown += every


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5] == "sticky")
