"""What the fault tests let a store do: commits of every kind, sealed in between,
each acknowledged when it returned.

Run by test_power_cut.py with `disk.c` preloaded. A store that holds the first N commits must look
exactly like `expected(N)`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.store.disk import ACKNOWLEDGED, preloaded
from trinity_data.schema import experience_id, group_id, rows_to_table
from trinity_data.store import maintenance
from trinity_data.store.reader import StoreReader
from trinity_data.store.store import Store
from trinity_data.store.types import Commit, State

KINDS = ("rows", "outcomes", "batch", "checkpoint")
TAIL_BYTES = 12_000


@dataclass
class Contents:
    """What a store holds, as far as the workload tells."""

    rows: list[tuple[int, int]] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)
    batches: dict[int, list[str]] = field(default_factory=dict)
    states: dict[State, int] = field(default_factory=lambda: dict.fromkeys(State, 0))
    progress: int | None = None
    checkpoint: int | None = None


def ids(step: int) -> list[str]:
    return [experience_id(group_id("explorer", "rl", step, 0), rollout) for rollout in range(4)]


def commit(store: Store, number: int) -> None:
    """The commit of this number; they are numbered from 0."""
    step, kind = number // len(KINDS) + 1, KINDS[number % len(KINDS)]
    if kind == "rows":
        rows = [
            {"experience_id": name, "group_id": group_id("explorer", "rl", step, 0), "stage": "rl",
             "step": step, "position": 0, "rollout": n, "turn": 0, "token_ids": list(range(40 * step)),
             "error": ""}
            for n, name in enumerate(ids(step))
        ]  # fmt: skip
        store.commit(
            Commit(tables={"experiences": rows_to_table("experiences", rows)}, progress={"step": step})
        )
    elif kind == "outcomes":
        found = [
            {"experience_id": name, "stage": "rl", "step": step, "kept": n < 2}
            for n, name in enumerate(ids(step)[:3])
        ]
        store.commit(Commit(tables={"outcomes": rows_to_table("outcomes", found)}))
    elif kind == "batch":
        store.form_batch("rl", step, ids(step)[:2])
    else:
        store.record_checkpoint(step, f"global_step_{step}", stage="rl")


def expected(num_commits: int) -> Contents:
    """What a store holds after so many commits."""
    held = Contents()
    for number in range(num_commits):
        step, kind = number // len(KINDS) + 1, KINDS[number % len(KINDS)]
        if kind == "rows":
            held.rows += [(step, rollout) for rollout in range(4)]
            held.states[State.RAW] += 4
            held.progress = step
        elif kind == "outcomes":
            held.outcomes += ids(step)[:3]
            for state, change in ((State.RAW, -3), (State.PENDING, 2), (State.DROPPED, 1)):
                held.states[state] += change
        elif kind == "batch":
            held.batches[step] = ids(step)[:2]
            held.states[State.PENDING] -= 2
            held.states[State.TRAINED] += 2
        else:
            held.checkpoint = step
    return held


def contents(store: StoreReader) -> Contents:
    """What a store really holds; token lists are checked as they are read."""
    rows = store.table("experiences", columns=["step", "rollout", "token_ids"]).to_pylist()
    assert all(row["token_ids"] == list(range(40 * row["step"])) for row in rows)
    steps = sorted({row["step"] for row in rows})
    checkpoint = store.latest_checkpoint()
    return Contents(
        rows=[(row["step"], row["rollout"]) for row in rows],
        outcomes=store.table("outcomes", columns=["experience_id"])["experience_id"].to_pylist(),
        batches={step: batch for step in steps if (batch := store.batch(step)) is not None},
        states=store.counts(),
        progress=store.progress("step"),
        checkpoint=None if checkpoint is None else checkpoint.step,
    )


def run(root: Path, acknowledge: Callable[[int], object], *, starts: int, commits_per_start: int) -> None:
    """Opens the store several times over.

    Each start seals its rows, merges files and folds the log into the ledger.
    """
    number = 0
    maintenance.FEW = 2  # otherwise files would be merged after the eighth start
    for _ in range(starts):
        store = Store.create_or_open(root, tail_bytes=TAIL_BYTES)
        # otherwise the log would be folded in after a thousand pages,
        # which is long after this workload has ended
        store._writing_ledger.execute("PRAGMA wal_autocheckpoint = 40")
        try:
            for _ in range(commits_per_start):
                commit(store, number)
                acknowledge(number)
                number += 1
            store.seal()
        finally:
            store.close()


def main(folder: Path, log: Path, starts: int, commits_per_start: int) -> None:
    """One process on a disk that is watched."""
    rows_to_table("experiences", [])
    preloaded().disk_watch(os.fsencode(folder), os.fsencode(log))
    file = os.open(folder / ACKNOWLEDGED, os.O_WRONLY | os.O_CREAT)
    run(
        folder / "job" / "store",
        lambda number: os.write(file, b"%d\n" % number),
        starts=starts,
        commits_per_start=commits_per_start,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
