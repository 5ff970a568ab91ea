"""Seconds until the first task of a large set, and memory as the stream goes on.

Each side runs in a fresh process. Memory is what a process has resident without Ray's object store, which all
of them map: at a mark, and the most since the mark before, looked at ten times a second.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import os
import resource
import tempfile
import threading
import time
from pathlib import Path

from tests.benchmarks.bench_tasks import question, with_workers
from tests.benchmarks.measure import show_machine
from tests.operators.task_streams import stream_spec, tasks_of, write_rows
from trinity_data.config import OperatorConfig
from trinity_data.launch.cluster import own_ray
from trinity_data.processes import descendants
from trinity_data.store.store import Store
from trinity_operators.task_chunks import StreamSpec

MARKS = (0.1, 0.2, 0.5, 1.0)
"""Shares of the rows at which memory is read."""

OPERATORS = (
    OperatorConfig(name="prompt_length_filter", args={"min_length": 2}),
    OperatorConfig(name="difficulty_filter", args={"max_steps": 10}),
)


def megabytes(pid: int) -> float:
    """Resident memory that is not shared; 0 of a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    sizes = {
        name: int(value.split()[0]) for name, value in (line.split(":", 1) for line in lines if "kB" in line)
    }
    return (sizes.get("RssAnon", 0) + sizes.get("RssFile", 0)) / 1024


def workers() -> list[int]:
    """The processes of Ray that this one's tasks and actors run in."""
    found = list[int]()
    for pid in descendants(os.getpid()):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if title.startswith(b"ray::"):
            found.append(pid)
    return found


def cpu_seconds() -> float:
    """Of this process, all of its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Peak(threading.Thread):
    """The most memory that this process had."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.highest = 0.0

    def run(self) -> None:
        while True:
            self.highest = max(self.highest, megabytes(os.getpid()))
            time.sleep(0.1)

    def take(self) -> float:
        """Since the last call."""
        highest, self.highest = self.highest, 0.0
        return highest


async def read(spec: StreamSpec, folder: Path, num_rows: int) -> None:
    store = Store.create_or_open(folder)
    peak = Peak()
    peak.start()
    marks = {max(1, int(share * num_rows)) for share in MARKS}
    started, count, cpu_before = time.perf_counter(), 0, cpu_seconds()
    async for _ in tasks_of(spec, store, window=1024):
        count += 1
        if count == 1:
            print(f"  first task after {time.perf_counter() - started:.2f} s", flush=True)
        if count in marks:
            sizes = " ".join(f"{megabytes(pid):.0f}" for pid in workers())
            seconds = time.perf_counter() - started
            print(
                f"  {count:9,} rows: {megabytes(os.getpid()):6.0f} MB here, at most "
                f"{peak.take():.0f}, workers [{sizes}] MB, "
                f"{count / seconds:,.0f} rows/s, {cpu_seconds() - cpu_before:.0f} s of CPU here",
                flush=True,
            )
    store.close()
    assert count == num_rows


def side(spec: StreamSpec, num_workers: int, num_rows: int) -> None:
    """What runs in a process of its own."""
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        if num_workers:
            with own_ray(log_to_driver=False, logging_level="ERROR"):
                asyncio.run(read(with_workers(spec, num_workers), Path(folder), num_rows))
        else:
            asyncio.run(read(with_workers(spec, 0), Path(folder), num_rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 2], help="0 is in process")
    arguments = parser.parse_args()
    show_machine()
    with tempfile.TemporaryDirectory() as folder:
        rows = (
            {"question": question(i), "answer": f"step\n#### {i}", "number": i} for i in range(arguments.rows)
        )
        write_rows(Path(folder), rows)
        spec = stream_spec(Path(folder), OPERATORS)
        for num_workers in arguments.workers:
            print(f"{arguments.rows:,} rows, " + (f"{num_workers} workers" if num_workers else "in process"))
            process = multiprocessing.get_context("spawn").Process(
                target=side, args=(spec, num_workers, arguments.rows)
            )
            process.start()
            process.join()
            assert process.exitcode == 0
    show_machine()


if __name__ == "__main__":
    main()
