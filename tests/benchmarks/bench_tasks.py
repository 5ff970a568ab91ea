"""Tasks a second through seven Data-Juicer operators and the task stream into the ledger.

Beside it: the same operators alone in this process, in two processes at once, which is the most that two
workers of this machine could do, and Data-Juicer's two executors. None of them keeps a record.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.benchmarks.measure import Seconds, in_turns, show, show_machine
from tests.operators.task_streams import stream_spec, tasks_of, write_rows
from trinity_data.config import OperatorConfig
from trinity_data.launch.cluster import own_ray
from trinity_data.store.store import Store
from trinity_operators.data_juicer.adapter import data_juicer_ops
from trinity_operators.registry import build_operators
from trinity_operators.runner import run_operators
from trinity_operators.task_chunks import StreamSpec
from trinity_operators.task_filtering import CHUNK_ROWS, TaskReader

SEVEN: Mapping[str, Mapping[str, Any]] = {
    "whitespace_normalization_mapper": {},
    "text_length_filter": {"min_len": 10, "max_len": 2000},
    "words_num_filter": {"min_num": 5, "max_num": 1000},
    "alphanumeric_filter": {"min_ratio": 0.3},
    "special_characters_filter": {"max_ratio": 0.6},
    "average_line_length_filter": {"min_len": 10},
    "maximum_line_length_filter": {"min_len": 10},
}


def question(number: int) -> str:
    return (
        f"Ann has {number % 97} apples and Ben has {number % 13} more than she does. They give {number % 7} "
        "of them away at the market. How many apples do the two of them have left in the evening?"
    )


def write_set(folder: Path, num_rows: int) -> StreamSpec:
    folder.mkdir(parents=True)
    rows = (
        {"question": question(number), "answer": f"step\n#### {number}", "number": number}
        for number in range(num_rows)
    )
    write_rows(folder, rows)
    return stream_spec(folder, [OperatorConfig(name=name, args=dict(args)) for name, args in SEVEN.items()])


async def read_stream(spec: StreamSpec, folder: Path, *, window: int) -> tuple[float, Seconds]:
    """Seconds until the first task, and from there until each `CHUNK_ROWS` more."""
    store = Store.create_or_open(folder)
    started, seconds, count = time.perf_counter(), list[float](), 0
    async for _ in tasks_of(spec, store, window=window):
        count += 1
        if count == 1:
            first = time.perf_counter() - started
        if count % CHUNK_ROWS == 0:
            seconds.append(time.perf_counter() - started - first)
    store.close()
    assert count == len(spec.open_reader().order)
    return first, [*seconds, time.perf_counter() - started - first]


def with_workers(spec: StreamSpec, num_workers: int) -> StreamSpec:
    execution: dict[str, Any] = {"execution": "ray" if num_workers else "in_process"}
    pipeline = spec.pipeline.model_copy(update=execution | {"num_process": max(num_workers, 1)})
    return StreamSpec(**vars(spec) | {"pipeline": pipeline})


def bench_whole_set(folder: Path, num_rows: int, rounds: int) -> None:
    spec = write_set(folder / "set", num_rows)
    reader = TaskReader(spec.taskset, spec.open_reader().source, range(num_rows), stage="rl")
    chunks = [reader.rows(at, at + CHUNK_ROWS).for_operators() for at in range(0, num_rows, CHUNK_ROWS)]
    operators = build_operators(spec.pipeline.operators, folder)
    texts = [question(number) for number in range(num_rows)]
    seconds_after_first: dict[str, Seconds] = {}

    def alone(part: slice = slice(None)) -> None:
        for chunk in chunks[part]:
            run_operators(operators, chunk, row_kind="task", id_column="task_id", stage="rl", step=None)

    def twice() -> None:
        # forks have the rows and the operators already
        halves = [
            multiprocessing.get_context("fork").Process(target=alone, args=(slice(n, None, 2),))
            for n in (0, 1)
        ]
        for half in halves:
            half.start()
        for half in halves:
            half.join()
            assert half.exitcode == 0

    def ours(num_workers: int) -> None:
        stored = folder / "stored"
        _, seconds = asyncio.run(read_stream(with_workers(spec, num_workers), stored, window=num_rows))
        seconds_after_first.setdefault(f"stream, {num_workers} workers", []).append(seconds[-1])
        shutil.rmtree(stored)

    sides = {
        "ours, two workers": lambda: ours(2),
        "ours, in process": lambda: ours(0),
        "the operators alone, one core": alone,
        "the operators alone, two processes": twice,
        "Data-Juicer on datasets": lambda: data_juicer_default(texts),
        "Data-Juicer on Ray": lambda: data_juicer_on_ray(texts),
    }
    times = in_turns(sides, rounds)
    print(f"\n{num_rows:,} rows through {len(SEVEN)} operators, from the start of the stream")
    show(times, ours="ours, two workers", rows=num_rows)
    print("from the first task on")
    for name, seconds in seconds_after_first.items():
        print(f"{name:44} {(num_rows - 1) / statistics.median(seconds[1:]):12,.0f} rows/s")


def bench_chunk(folder: Path, rounds: int) -> None:
    """A chunk at a time: a window of one chunk, so that the next is read when the explorer has taken it."""
    num_rows = CHUNK_ROWS * (rounds + 1)
    spec = write_set(folder / "small", num_rows)
    texts = [question(number) for number in range(CHUNK_ROWS)]
    print(f"\n{CHUNK_ROWS} rows, stream warm")
    for name, num_workers in (("in process", 0), ("two workers", 2)):
        stored = folder / f"stored_{num_workers}"
        _, seconds = asyncio.run(read_stream(with_workers(spec, num_workers), stored, window=CHUNK_ROWS))
        between = [after - before for before, after in pairwise(seconds[:-1])]
        print(f"ours, {name:38} {statistics.median(between) * 1e3:9.2f} ms")
    times = in_turns({"Data-Juicer on Ray": lambda: data_juicer_on_ray(texts)}, min(rounds, 5))
    show(times, ours="Data-Juicer on Ray", rows=CHUNK_ROWS)


def data_juicer_operators() -> list[Any]:
    data_juicer_ops()
    from data_juicer.ops import load_ops

    common = {"num_proc": None, "auto_op_parallelism": False}
    operators: list[Any] = load_ops([{name: dict(args) | common} for name, args in SEVEN.items()])
    return operators


def data_juicer_default(texts: list[str]) -> None:
    from data_juicer.core.data import NestedDataset
    from datasets import disable_progress_bars

    disable_progress_bars()
    NestedDataset.from_dict({"text": texts}).process(data_juicer_operators())


def data_juicer_on_ray(texts: list[str]) -> None:
    import ray.data
    from data_juicer.core.data.ray_dataset import RayDataset

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    before, context.target_max_block_size = context.target_max_block_size, 128 << 20
    rows = ray.data.from_arrow(pa.table({"text": texts}))
    RayDataset(rows).process(data_juicer_operators()).data.materialize()
    context.target_max_block_size = before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    show_machine()
    with (
        tempfile.TemporaryDirectory() as folder,
        own_ray(log_to_driver=False, logging_level="ERROR"),
    ):
        bench_chunk(Path(folder) / "chunk", max(arguments.rounds * 10, 10))
        bench_whole_set(Path(folder) / "whole", arguments.rows, arguments.rounds)
    show_machine()


if __name__ == "__main__":
    main()
