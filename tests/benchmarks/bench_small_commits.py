"""Does the store stay as fast and as small after 10^5 small commits as it was at first?

Run by hand or by `make bench`. A commit is two rows of experiences, or their outcomes;
every twentieth forms a batch. Each is waited for.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from trinity_data.query.audit import audit
from trinity_data.schema import experience_id, group_id, rows_to_table
from trinity_data.store.store import Store
from trinity_data.store.types import Commit


def run(root: Path, commits: int, tail_bytes: int) -> None:
    store = Store.create_or_open(root, tail_bytes=tail_bytes)
    seconds, sizes, files = np.zeros(commits), list[int](), list[int]()
    waiting: list[str] = []
    for number in range(commits):
        work = prepared(store, number, waiting)
        started = time.perf_counter()
        work()
        seconds[number] = time.perf_counter() - started
        if (number + 1) % max(1, commits // 10) == 0:
            sizes.append(resident_bytes())
            files.append(num_files(root))
            tenth = seconds[number + 1 - max(1, commits // 10) : number + 1] * 1e3
            print(
                f"{number + 1:>8,} commits  p50 {np.quantile(tenth, 0.5):7.2f} ms  p99 "
                f"{np.quantile(tenth, 0.99):7.2f} ms  max {tenth.max():8.1f} ms  {sizes[-1] / 2**20:6.0f} "
                f"MiB resident  {files[-1]:3} files  load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    store.seal()
    store.close()
    show(seconds, sizes, files, root)


def prepared(store: Store, number: int, waiting: list[str]) -> Callable[[], None]:
    """The work of a commit, its rows made outside the time that is measured."""
    if number % 20 == 19:
        batch = waiting[:]
        waiting.clear()
        return lambda: store.form_batch("rl", number // 20, batch)
    group = group_id("explorer", "rl", number // 40, number % 40 // 2)
    names = [experience_id(group, rollout) for rollout in range(2)]
    if number % 2:
        rows = [{"experience_id": n, "stage": "rl", "step": number // 40, "kept": True} for n in names]
        waiting += names
        table = rows_to_table("outcomes", rows)
        return lambda: store.commit(Commit(tables={"outcomes": table}))
    rows = [
        {"experience_id": n, "group_id": group, "stage": "rl", "step": number // 40,
         "position": number % 40 // 2, "rollout": rollout, "turn": 0, "token_ids": list(range(60)),
         "logprobs": [-0.5] * 40, "error": ""}
        for rollout, n in enumerate(names)
    ]  # fmt: skip
    table = rows_to_table("experiences", rows)
    return lambda: store.commit(Commit(tables={"experiences": table}, progress={"at": number}))


def show(seconds: np.ndarray, sizes: list[int], files: list[int], root: Path) -> None:
    tenth = max(1, len(seconds) // 10)
    for name, part in (("first tenth", seconds[:tenth]), ("last tenth", seconds[-tenth:])):
        print(
            f"{name:12} p50 {np.quantile(part, 0.5) * 1e3:7.2f} ms   p99 "
            f"{np.quantile(part, 0.99) * 1e3:7.2f} ms"
        )
    print(
        f"resident: {sizes[0] / 2**20:.0f} MiB after the first tenth, "
        f"{sizes[-1] / 2**20:.0f} MiB after the last"
    )
    print(f"files: at most {max(files)} at a tenth, {num_files(root)} when closed")
    started = time.perf_counter()
    report = audit(root)
    print(
        f"audit: {report.total.generated:,} rows, {len(report.problems)} problems, "
        f"{time.perf_counter() - started:.1f} s"
    )


def num_files(root: Path) -> int:
    return sum(path.is_file() for path in (root / "segments").rglob("*"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commits", type=int, default=100_000)
    parser.add_argument("--tail-bytes", type=int, default=32 << 20)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured")
    arguments = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        run(Path(folder) / "store", arguments.commits, arguments.tail_bytes)


if __name__ == "__main__":
    main()
