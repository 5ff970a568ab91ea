"""Kills a writing process at random moments, again and again, and counts.

`make soak`, or `python -m tests.store.soak --kills N`. Each process is forked from this one, which has
imported everything already, so that a kill may also hit the opening of the store, its recovery, sealing and
merging. What a child acknowledged is what it wrote to a pipe.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.forked import fork, in_a_process
from tests.store.disk_workload import commit, contents, expected
from trinity_data.query.audit import audit
from trinity_data.schema import rows_to_table
from trinity_data.store import maintenance
from trinity_data.store.reader import StoreReader
from trinity_data.store.store import Store

KILLS_PER_STORE = 25
_TAIL_BYTES = 12_000


@dataclass
class Count:
    """What became of all commits together."""

    kills: int = 0
    acknowledged: int = 0
    lost: int = 0
    doubled: int = 0
    unacknowledged: int = 0
    """Found whole, although the kill came before anybody was told."""
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.kills:,} kills, {self.acknowledged:,} commits acknowledged: {self.lost} lost, "
            f"{self.doubled} doubled; "
            f"{self.unacknowledged:,} were whole before they were acknowledged; "
            f"{len(self.wrong)} other things wrong"
        )


def soak(folder: Path, kills: int, *, seed: int) -> Count:
    """Kills so many writers; each store is killed many times over, then audited."""
    chance, count = random.Random(seed), Count()
    rows_to_table("experiences", [])
    number = 0
    while count.kills < kills:
        root = folder / f"{number}" / "store"
        number += 1
        held = 0
        for _ in range(min(KILLS_PER_STORE, kills - count.kills)):
            held = _kill_once(root, held, chance.uniform(0, 0.25), count)
        in_a_process(partial(_audit, root), count.wrong)
    return count


def _kill_once(root: Path, held: int, seconds: float, count: Count) -> int:
    """Kills one writer that goes on after `held` commits; returns how many the store holds then."""
    output, pid = fork(lambda send: _write_on(root, held, send))
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    acknowledged = held + len(output.read().split())
    os.waitpid(pid, 0)
    count.kills += 1
    count.acknowledged += acknowledged - held
    found = in_a_process(lambda send: send(held_by(root, acknowledged)), count.wrong)
    if not found:
        return acknowledged
    now, doubled = map(int, found.split())
    count.lost += max(0, acknowledged - now)
    count.unacknowledged += max(0, now - acknowledged)
    count.doubled += doubled
    return now


def _write_on(root: Path, first: int, send: Callable[[str], None]) -> None:
    """Commits without end, from commit `first` on; now and then all rows are sealed."""
    maintenance.FEW = 3
    store = Store.create_or_open(root, tail_bytes=_TAIL_BYTES)
    number = first
    while True:
        commit(store, number)
        number += 1
        send(f"{number}\n")
        if number % 16 == 0:
            store.seal()


def held_by(root: Path, acknowledged: int) -> str:
    """How many commits the store holds, and how many rows twice.

    Raises when it holds anything but a prefix.
    """
    if not root.exists():
        return f"{0 if acknowledged == 0 else -1} 0"
    store = Store.create_or_open(root, tail_bytes=_TAIL_BYTES)
    found = contents(store)
    store.close()
    doubled = len(found.rows) - len(set(found.rows)) + len(found.outcomes) - len(set(found.outcomes))
    near = (n for n in (acknowledged, acknowledged + 1, *range(acknowledged)) if found == expected(n))
    number = next(near, None)
    if number is None and not doubled:
        raise AssertionError(f"{root} is no prefix of {acknowledged} commits: {found}")
    return f"{acknowledged if number is None else number} {doubled}"


def _audit(root: Path, send: Callable[[str], None]) -> None:
    if not root.exists():
        return
    if problems := audit(root).problems:
        raise AssertionError(f"{root}: {problems}")
    reader = StoreReader(root)
    num_files = len(list((root / "segments").rglob("*.*")))
    if num_files != len(reader.segments()) or num_files > 60:
        raise AssertionError(f"{root} has {num_files} files and {len(reader.segments())} segments")
    send("sound")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        count = soak(Path(folder), arguments.kills, seed=arguments.seed)
    print(f"{count}; {time.monotonic() - started:,.0f} s")
    for problem in count.wrong[:10]:
        print(f"- {problem}")
    sys.exit(bool(count.lost or count.doubled or count.wrong))


if __name__ == "__main__":
    main()
