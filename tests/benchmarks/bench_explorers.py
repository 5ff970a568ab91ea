"""Rollouts a second of one, two and four explorers, each a process that writes to the store of another one,
beside one explorer that owns its store; with engines that answer at once.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from tests.benchmarks.bench_rollouts import build
from tests.benchmarks.measure import show_machine
from trinity_data.launch.cluster import own_ray
from trinity_data.processes import relaxed_gc
from trinity_data.store.remote import RemoteStore, local_reader, start_store
from trinity_data.store.store import Store

BATCH_SIZE, REPEAT_TIMES = 64, 8
NUM_EXPLORERS = 1, 2, 4


class ExplorerProcess:
    """Writes to the store of `owner`, or to one of its own."""

    def __init__(self, folder: Path, name: str, owner: Any | None) -> None:
        own, self.step = folder / name, 0
        own.mkdir()
        store = (
            Store.create_or_open(own / "store")
            if owner is None
            else RemoteStore(owner, folder / "store", reader=local_reader(owner, folder / "store"))
        )
        self.explorer = build(own, store, BATCH_SIZE, REPEAT_TIMES, name=name)

    async def explore(self, steps: int) -> None:
        """The next ones."""
        with relaxed_gc():
            for _ in range(steps):
                self.step += 1
                await self.explorer.explore_step(self.step)


def rate(explorers: Sequence[Any], steps: int) -> float:
    """Rollouts a second of all, from the begin of the first to the end of the last."""
    started = time.perf_counter()
    ray.get([explorer.explore.remote(steps) for explorer in explorers])
    return len(explorers) * steps * BATCH_SIZE * REPEAT_TIMES / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="of each explorer in a round")
    arguments = parser.parse_args()
    show_machine()
    kind = ray.remote(ExplorerProcess).options(num_cpus=0)
    with tempfile.TemporaryDirectory() as name, own_ray(log_to_driver=False, logging_level="ERROR"):
        folder = Path(name)
        owner = start_store(folder / "store")
        sides = {"one that owns its store": [kind.remote(folder, "alone", None)]}
        others = [kind.remote(folder, f"explorer_{number}", owner) for number in range(max(NUM_EXPLORERS))]
        sides |= {f"{number} beside the store": others[:number] for number in NUM_EXPLORERS}
        for explorers in sides.values():
            rate(explorers, 2)  # starts, and fills what is remembered
        rates: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(arguments.rounds):
            for side, explorers in sides.items():
                rates[side].append(rate(explorers, arguments.steps))
        alone = statistics.median(rates["one that owns its store"])
        for side, found in rates.items():
            middle = statistics.median(found)
            span = f"({min(found):,.0f} to {max(found):,.0f})"
            print(f"{side:26} {middle:8,.0f} rollouts/s {span} {middle / alone:6.2f} x", flush=True)
    show_machine()


if __name__ == "__main__":
    main()
