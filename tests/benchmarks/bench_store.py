"""How fast the store is, beside the plainest thing that is as durable. Run by hand: `python tests/benchmarks/bench_store.py`.

Both sides run in turns in one process and medians are compared, because disks and neighbours vary.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trinity_data.schema import TABLES, experience_id, group_id, rows_to_table
from trinity_data.store.audit import audit
from trinity_data.store.commit import Commit
from trinity_data.store.sql import open_sql
from trinity_data.store.store import Store

ROWS = 64
PROMPT, RESPONSE = 140, 400


def rollouts(commit: int, rng: np.random.Generator) -> pa.Table:
    """64 rows of 540 tokens in groups of 8, with log-probs and about 1.5 kB of text."""
    rows: list[dict[str, object]] = []
    for number in range(ROWS):
        group = group_id("explorer", "rl", commit, number // 8)
        words = rng.integers(0, 2000, RESPONSE // 2)
        rows.append(
            {
                "experience_id": experience_id(group, number % 8),
                "task_id": f"task-{int(rng.integers(0, 7473))}",
                "group_id": group,
                "stage": "rl",
                "step": commit,
                "position": number // 8,
                "rollout": number % 8,
                "turn": 0,
                "attempt": 0,
                "explorer": "explorer",
                "engine": "vllm",
                "seed": number,
                "temperature": 1.0,
                "model_version": commit - 1,
                "version_spans": [{"start": 0, "version": commit - 1}],
                "prompt_length": PROMPT,
                "response_length": RESPONSE,
                "token_ids": np.minimum(rng.zipf(1.3, PROMPT + RESPONSE), 150_000).astype(np.int32),
                "logprobs": -rng.exponential(0.3, RESPONSE).astype(np.float32),
                "action_mask": np.ones(RESPONSE, bool),
                "response_text": " ".join(f"word{word}" for word in words),
                "reward": float(rng.integers(0, 2)),
                "reward_parts": {"accuracy": 1.0, "format": 0.0},
                "error": "",
            }
        )
    return rows_to_table("experiences", rows)


def outcomes(rows: pa.Table) -> pa.Table:
    """Every row kept, with an advantage."""
    kept = rows.select(["experience_id", "group_id", "stage", "step", "reward"])
    kept = kept.append_column("advantage", kept["reward"])
    kept = kept.append_column("kept", pa.array([True] * rows.num_rows))
    columns = [
        kept[f.name] if f.name in kept.column_names else pa.nulls(rows.num_rows, f.type)
        for f in TABLES["outcomes"]
    ]
    return pa.Table.from_arrays(columns, schema=TABLES["outcomes"])


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def bench_append(root: Path, commits: int) -> None:
    """One waiting commit of 64 rows at a time, and the same rows submitted without waiting."""
    rng = np.random.default_rng(0)
    tables = [rollouts(number, rng) for number in range(1, commits + 1)]
    store = Store.create_or_open(root / "store")
    schema = TABLES["experiences"]
    plain, ours, judged = [], [], []
    with (root / "plain.arrows").open("wb", buffering=0) as file, pa.ipc.new_stream(file, schema) as stream:

        def append(table: pa.Table) -> None:
            stream.write_table(table)
            os.fdatasync(file.fileno())

        for table in tables:
            plain.append(timed(lambda table=table: append(table)))
            ours.append(timed(lambda table=table: store.commit(Commit(tables={"experiences": table}))))
            judged.append(
                timed(lambda table=table: store.commit(Commit(tables={"outcomes": outcomes(table)})))
            )
    show("append 64 rows, raw Arrow + fdatasync", statistics.median(plain), ROWS)
    show("append 64 rows, store.commit", statistics.median(ours), ROWS, statistics.median(plain))
    show("their outcomes, store.commit", statistics.median(judged), ROWS)
    print(f"{'':52} p99 {np.quantile(ours, 0.99) * 1e3:8.2f} ms; {tables[0].nbytes / ROWS:,.0f} bytes a row")

    again = [rollouts(number, rng) for number in range(commits + 1, 2 * commits + 1)]

    def submit_all() -> None:
        futures = []
        for table in again:
            futures.append(store.submit(Commit(tables={"experiences": table})))
            futures.append(store.submit(Commit(tables={"outcomes": outcomes(table)})))
        for future in futures:
            future.result()

    show("rows with outcomes, submitted without waiting", timed(submit_all), ROWS * commits)
    bench_read(store)
    store.close()


def bench_read(store: Store) -> None:
    """A training batch of 256 rows: read, hot and sealed."""
    columns = ["token_ids", "logprobs", "action_mask", "prompt_length", "model_version"]
    ids = store.pending("rl")
    for name, waiting in (("hot", ids[-4096:]), ("sealed", ids[:4096])):
        times = []
        for start in range(0, len(waiting) - 256, 256):
            batch = waiting[start : start + 256]
            times.append(timed(lambda batch=batch: store.read(batch, columns)))
        show(f"read a batch of 256 rows, {name}", statistics.median(times), 256)
    times = []
    for step in range(1, 11):
        batch = store.pending("rl", limit=256)
        times.append(timed(lambda batch=batch, step=step: store.form_batch("rl", step, batch)))
    show("form_batch of 256 rows", statistics.median(times), 256)


def bench_sql(root: Path) -> None:
    """Group-bys over what was written, beside DuckDB on one Parquet file of the same rows."""
    opening = statistics.median(timed(lambda: open_sql([root]).close()) for _ in range(3))
    with open_sql([root]) as session:
        rows = session.query("FROM rollouts")
        pq.write_table(rows, root / "one.parquet", compression="zstd")
        plain = duckdb.connect()
        plain.execute(f"CREATE VIEW rollouts AS FROM read_parquet('{root / 'one.parquet'}')")
        show(f"open a session over {rows.num_rows:,} experiences", opening, rows.num_rows)
        for name, sql in {
            "group-by on rollouts": "SELECT step, avg(reward), avg(response_length) FROM rollouts GROUP BY step",
            "group-by on experiences": "SELECT step, state, avg(reward), avg(advantage) FROM experiences GROUP BY ALL",
        }.items():
            ours = statistics.median(timed(lambda sql=sql: session.query(sql)) for _ in range(7))
            beside = statistics.median(
                timed(
                    lambda: plain.sql(
                        "SELECT step, avg(reward), avg(response_length) FROM rollouts GROUP BY step"
                    ).to_arrow_table()
                )
                for _ in range(7)
            )
            show(name, ours, rows.num_rows, beside)
    show("audit", timed(lambda: audit(root)), rows.num_rows)
    sealed = sum(f.stat().st_size for f in (root / "store/segments/experiences").glob("*.parquet"))
    print(
        f"disk: experiences {sealed / 1e6:,.1f} MB in segments, {(root / 'one.parquet').stat().st_size / 1e6:,.1f} MB in one file"
    )


def show(what: str, seconds: float, rows: int, beside: float | None = None) -> None:
    ratio = "" if beside is None else f"   {beside / seconds:5.2f}x of plain"
    print(f"{what:52} {seconds * 1e3:10.2f} ms {rows / seconds:12,.0f} rows/s{ratio}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commits", type=int, default=200, help="of 64 rows each, twice")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured")
    arguments = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        bench_append(Path(folder), arguments.commits)
        store = Store.create_or_open(Path(folder) / "store")
        store.seal()
        store.close()
        bench_sql(Path(folder))


if __name__ == "__main__":
    main()
