"""Another pipeline over a stored buffer: in this process, and spread over Ray Data's workers.

For each number of rows the rate, and the memory on the way: of this process, and of the workers besides.
`--rows 125000 1000000` shows that memory does not grow with the rows.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from tests.benchmarks.measure import show_machine, timed
from tests.benchmarks.rows import outcomes, rollouts
from trinity_data.config import RunConfig, load_pipeline_file
from trinity_data.launch.cluster import local_ray
from trinity_data.launch.whatif import RerunStep, Total, operators_of, rerun_operators, stored_steps
from trinity_data.launch.whatif_workers import Spread, rerun_spread
from trinity_data.processes import descendants
from trinity_data.schema import rows_to_table
from trinity_data.store.store import Store
from trinity_data.store.types import Commit

ROWS_A_STEP = 2_048
PIPELINE = """
project: bench
name: whatif
checkpoint_root_dir: {root}
algorithm: {{algorithm_type: grpo, repeat_times: 8}}
model: {{model_path: 'synthetic://qwen2-1m', max_prompt_tokens: 64, max_response_tokens: 64}}
buffer:
  batch_size: 256
  total_steps: 1
  explorer_input:
    taskset:
      path: synthetic://gsm8k
      format: {{prompt_key: question, response_key: answer}}
      default_workflow_type: math_workflow
data_processor:
  experience_pipeline:
    operators:
      - {{name: response_length_filter, args: {{max_length: 64}}}}
      - {{name: repetition_penalty}}
      - {{name: reward_std_filter}}
stages:
  - stage_name: rl
"""


def fill(root: Path, rows: int) -> None:
    """Short rows in groups of 8, a commit a step; sealed."""
    rng = np.random.default_rng(0)
    store = Store.create_or_open(root / "store")
    for step in range(1, rows // ROWS_A_STEP + 2):
        table = rollouts(step, rng, num_rows=ROWS_A_STEP, prompt_length=16, response_length=24)
        groups = dict.fromkeys(table["group_id"].to_pylist())
        planned: list[dict[str, object]] = [
            {"group_id": group, "stage": "rl", "step": step, "position": position, "round": 0}
            for position, group in enumerate(groups)
        ]
        tables = {"groups": rows_to_table("groups", planned), "experiences": table}
        store.submit(Commit(tables=tables | {"outcomes": outcomes(table, drop_every=5)})).result()
    store.seal()
    store.close()


class Memory:
    """The most that this process, and all that it started, held at any time, in MiB."""

    def __init__(self) -> None:
        self.own = self.others = 0.0

    def look(self) -> None:
        self.own = max(self.own, _private("self"))
        self.others = max(self.others, sum(_private(f"{pid}") for pid in descendants(os.getpid())))


@contextmanager
def watched() -> Iterator[Memory]:
    """Looks five times a second."""
    memory, over = Memory(), threading.Event()

    def look() -> None:
        while not over.wait(0.2):
            memory.look()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield memory
    finally:
        over.set()
        thread.join()


def _private(process: str) -> float:
    """What is its own, without files that it maps."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) / 1024
    return 0.0


def measure(what: str, steps: Callable[[], Iterator[RerunStep]]) -> Total:
    total = Total()

    def go() -> None:
        for _ in total.adding(steps()):
            pass

    with watched() as memory:
        seconds = timed(go)
    rows = total.comparison.num_rows
    print(
        f"  {what:12} {rows:>9,} rows {seconds:7.1f} s {rows / seconds:>9,.0f} rows/s"
        f"   this process {memory.own:6.0f} MiB, others {memory.others:6.0f} MiB",
        flush=True,
    )
    return total


def compare_both(config: RunConfig, root: Path) -> None:
    stage, base_dir = config.stages[0], config.file.parent
    steps = stored_steps(root, "rl")
    operators = operators_of(root, stage, base_dir)
    here = measure("in process", lambda: rerun_operators(root, operators, "rl", steps))
    with local_ray(config):
        spread = Spread(root, stage, base_dir, with_tables=False)
        there = measure("Ray Data", lambda: rerun_spread(spread, steps))
    assert here.comparison == there.comparison


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[20_000])
    arguments = parser.parse_args()
    show_machine()
    for rows in arguments.rows:
        with tempfile.TemporaryDirectory() as name:
            root = Path(name)
            (root / "pipeline.yaml").write_text(PIPELINE.format(root=root))
            # in a process of its own, whose memory is none of a rerun's
            filling = get_context("spawn").Process(target=fill, args=(root, rows))
            filling.start()
            print(f"{rows:,} rows, filled in {timed(filling.join):.0f} s", flush=True)
            compare_both(load_pipeline_file(root / "pipeline.yaml"), root)
    show_machine()


if __name__ == "__main__":
    main()
