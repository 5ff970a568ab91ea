"""Opens a run of 10^6 experiences, asks it a question, and audits it."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import numpy as np

from tests.benchmarks.measure import show_machine, timed
from tests.benchmarks.rows import outcomes, rollouts
from trinity_data.query.audit import audit
from trinity_data.store.sql import open_sql
from trinity_data.store.store import Store
from trinity_data.store.types import Commit

COMMIT = 2_048
BATCH = 1_024


def fill(root: Path, rows: int) -> None:
    """Short rows, most of them trained; sealed."""
    rng = np.random.default_rng(0)
    store = Store.create_or_open(root / "store")
    for number in range(1, rows // COMMIT + 2):
        table = rollouts(number, rng, num_rows=COMMIT, prompt_length=16, response_length=24)
        store.submit(Commit(tables={"experiences": table, "outcomes": outcomes(table)})).result()
        for half in range(2):
            store.form_batch("rl", 2 * number + half, store.pending("rl", limit=BATCH))
    store.seal()
    store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured")
    arguments = parser.parse_args()
    show_machine()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        root = Path(name)
        print(f"fill: {timed(lambda: fill(root, arguments.rows)):.0f} s", flush=True)

        def open_to_write() -> None:
            Store.create_or_open(root / "store").close()

        def ask() -> None:
            with open_sql([root]) as session:
                session.query("SELECT count(*) FROM rollouts")

        for what, work in {"open to write, and close": open_to_write, "open, one query, close": ask}.items():
            print(f"{what:30} {statistics.median(timed(work) for _ in range(3)):6.2f} s", flush=True)
        reports = []
        seconds = timed(lambda: reports.append(audit(root)))
        print(
            f"{'audit':30} {seconds:6.2f} s: {reports[0].total.generated:,} rows, "
            f"{len(reports[0].problems)} problems"
        )
    show_machine()


if __name__ == "__main__":
    main()
