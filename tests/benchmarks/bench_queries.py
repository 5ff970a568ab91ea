"""Group-bys over 10^5 experiences beside plain DuckDB on one file,
a writer with a reader beside it, and disk space.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import duckdb
import numpy as np
import pyarrow.parquet as pq

from tests.benchmarks.measure import Seconds, in_turns, show, show_machine, timed
from tests.benchmarks.rows import outcomes, rollouts
from trinity_data.store.sql import SqlSession, open_sql
from trinity_data.store.store import Store
from trinity_data.store.types import Commit

QUERIES = {
    "reward and length by step": "SELECT step, avg(reward), avg(response_length) FROM {} GROUP BY step",
    "state and advantage by step": "SELECT step, state, avg(reward), avg(advantage) FROM {} GROUP BY ALL",
}


def fill(root: Path, rows: int) -> None:
    """A run of so many experiences that has ended: a step has 64,
    of which half are trained and half were dropped.
    """
    rng = np.random.default_rng(0)
    store = Store.create_or_open(root / "store")
    for step in range(1, rows // 64 + 1):
        table = rollouts(step, rng)
        store.commit(Commit(tables={"experiences": table, "outcomes": outcomes(table, drop_every=2)}))
        store.form_batch("rl", step, store.pending("rl"))
    store.seal()
    store.close()


def bench_group_by(root: Path, rounds: int) -> None:
    """The rows of the view beside one Parquet file that holds the very same rows."""
    print(
        "\nopen a session: "
        f"{statistics.median(timed(lambda: open_sql([root]).close()) for _ in range(5)) * 1e3:.0f} ms"
    )
    with open_sql([root]) as session, duckdb.connect() as plain:
        plain.execute("SET parquet_metadata_cache = true")
        for view, query in (("rollouts", 0), ("experiences", 0), ("experiences", 1)):
            name, sql = list(QUERIES.items())[query]
            file = root / f"{view}.parquet"
            if not file.exists():
                pq.write_table(session.query(f"FROM {view}"), file, compression="zstd")
            sides = {
                f"ours: {view}, {name}": lambda sql=sql, view=view: session.query(sql.format(view)),
                "plain DuckDB on one file": lambda sql=sql, file=file: plain.sql(
                    sql.format(f"'{file}'")
                ).to_arrow_table(),
            }
            print()
            show(in_turns(sides, rounds), ours=next(iter(sides)), rows=_count(session))


def _count(session: SqlSession) -> int:
    return int(session.query("SELECT count(*) AS n FROM rollouts")["n"][0].as_py())


def show_disk(root: Path) -> None:
    ours = sum(file.stat().st_size for file in (root / "store/segments/experiences").glob("*.parquet"))
    one = (root / "rollouts.parquet").stat().st_size
    print(f"\ndisk: {ours / 1e6:.1f} MB in segments, {one / 1e6:.1f} MB in one zstd file: {ours / one:.2f}")


def bench_reader_beside_writer(root: Path, phases: int, commits: int) -> None:
    """A writer that commits 64 rows with their outcomes and pauses,
    alone and beside a process that asks once a second.
    """
    rng = np.random.default_rng(1)
    store = Store.create_or_open(root / "store")
    times: dict[str, Seconds] = {"writer alone": [], "writer beside queries": []}
    number = 1_000_000
    for phase in range(2 * phases):
        reader = _reader(root) if phase % 2 else None
        for _ in range(commits):
            number += 1
            table = rollouts(number, rng)
            commit = Commit(tables={"experiences": table, "outcomes": outcomes(table)})
            times["writer beside queries" if reader else "writer alone"].append(
                timed(partial(store.commit, commit))
            )
            time.sleep(0.03)
        if reader is not None:
            reader.terminate()
            reader.wait()
    store.close()
    print("\na commit of 64 rows while another process opens a session and asks, once a second")
    show(times, ours="writer alone", rows=64)


def _reader(root: Path) -> subprocess.Popen[bytes]:
    reader = subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks.bench_queries", "--ask", str(root)], stdout=subprocess.PIPE
    )
    assert reader.stdout is not None
    reader.stdout.readline()  # it has asked once
    return reader


def ask_until_stopped(root: Path) -> None:
    while True:
        with open_sql([root]) as session:
            session.query(QUERIES["reward and length by step"].format("rollouts"))
        print("asked", flush=True)
        time.sleep(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=102_400)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured")
    parser.add_argument("--ask", type=Path, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ask is not None:
        ask_until_stopped(arguments.ask)
    show_machine()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        root = Path(name)
        fill(root, arguments.rows)
        bench_group_by(root, rounds=40)
        show_disk(root)
        bench_reader_beside_writer(root, phases=4, commits=60)
    show_machine()


if __name__ == "__main__":
    main()
