"""The copies that a stage makes by default: CPU seconds and bytes, beside those of the store."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from tests.benchmarks.measure import show_machine
from tests.benchmarks.rows import outcomes, rollouts
from trinity_data.exchange.buffer_file import Copy, write_buffer_file
from trinity_data.store.store import Store
from trinity_data.store.types import Commit

COMMIT = 500
COPIES = (Copy("experience_buffer.jsonl"), Copy("sqlite:///explorer_output.db", table="pipeline_input"))


def fill(root: Path, rows: int) -> Store:
    """Sealed rows of 140 + 400 tokens."""
    rng = np.random.default_rng(0)
    store = Store.create_or_open(root / "store")
    for number in range(1, rows // COMMIT + 1):
        table = rollouts(number, rng, num_rows=COMMIT)
        store.commit(Commit(tables={"experiences": table, "outcomes": outcomes(table)}))
    store.seal()
    return store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000)
    rows = parser.parse_args().rows
    show_machine()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        store = fill(root, rows)
        stored = sum(file.stat().st_size for file in (root / "store").rglob("*") if file.is_file())
        print(f"{rows:,} rows: the store {stored / 1e6:,.0f} MB")
        for copy in COPIES:
            wall, cpu = time.perf_counter(), time.process_time()
            target = write_buffer_file(store, copy, root / "buffer")
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            print(f"{target.name}: {target.stat().st_size / 1e6:,.0f} MB, {cpu:.1f} s of CPU, {wall:.1f} s")
        store.close()


if __name__ == "__main__":
    main()
