"""Durable appends of 64 rows of 540 tokens, and the next training batch,
beside other ways to keep such rows.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from tests.benchmarks.beside import ArrowStream, Beside, ParquetFiles, PickledRows, SqliteRows
from tests.benchmarks.measure import Seconds, in_turns, show, show_machine, timed
from tests.benchmarks.rows import outcomes, rollouts
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_trainer.collate import BatchCollator

ROWS = 64
BATCH = 256
COLUMNS = ["token_ids", "logprobs", "action_mask", "prompt_length", "advantage", "temperature"]


def bench_append(store: Store, others: dict[str, Beside], commits: int) -> None:
    """One commit that is waited for, on each side in turns."""
    rng = np.random.default_rng(0)
    times: dict[str, Seconds] = {name: [] for name in ("ours", *others, "ours: their outcomes")}
    for number in range(1, commits + 1):
        table = rollouts(number, rng)
        rows, judged = Commit(tables={"experiences": table}), Commit(tables={"outcomes": outcomes(table)})
        times["ours"].append(timed(partial(store.commit, rows)))
        for name, other in others.items():
            times[name].append(timed(partial(other.append, table)))
        times["ours: their outcomes"].append(timed(partial(store.commit, judged)))
    print(f"\nappend {ROWS} rows of {table.nbytes / ROWS:,.0f} bytes, durable")
    show(times, ours="ours", rows=ROWS)
    more = [rollouts(number, rng) for number in range(commits + 1, 2 * commits + 1)]
    print("\nthe same without waiting for each, in one go")
    show({"ours": [timed(lambda: _submit_all(store, more))]}, ours="ours", rows=ROWS * commits)


def _submit_all(store: Store, tables: list[pa.Table]) -> None:
    futures = [
        store.submit(Commit(tables={"experiences": each, "outcomes": outcomes(each)})) for each in tables
    ]
    for future in futures:
        future.result()


def bench_batch(store: Store, others: dict[str, Beside], rounds: int) -> None:
    """The next 256 rows, while they are hot, as the arrays that torch takes."""
    waiting = store.pending("rl", limit=(rounds + 1) * BATCH)
    batches = iter([waiting[start : start + BATCH] for start in range(0, len(waiting), BATCH)])
    sides = {"ours": lambda: BatchCollator(store.read(next(batches), COLUMNS))}
    sides |= {name: lambda other=other: other.read(0, BATCH) for name, other in others.items()}
    print(f"\nthe next batch of {BATCH} rows, hot")
    show(in_turns(sides, min(rounds, len(waiting) // BATCH - 1)), ours="ours", rows=BATCH)
    taking = "ours: choosing it and taking it for good"
    forming = [
        timed(lambda step=step: store.form_batch("rl", step, store.pending("rl", limit=BATCH)))
        for step in range(1, len(waiting) // BATCH + 1)
    ]
    show({taking: forming}, ours=taking, rows=BATCH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commits", type=int, default=100)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured")
    arguments = parser.parse_args()
    show_machine()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        store = Store.create_or_open(folder / "store")
        others: dict[str, Beside] = {
            "raw Arrow and fsync": ArrowStream(folder),
            "Parquet file a commit": ParquetFiles(folder),
            "SQLite executemany": SqliteRows(folder),
            "SQLAlchemy, blobs, a flush a row": PickledRows(folder),
        }
        bench_append(store, others, arguments.commits)
        bench_batch(store, others, 20)
        store.close()
    show_machine()


if __name__ == "__main__":
    main()
