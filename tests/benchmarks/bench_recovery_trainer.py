"""A rank of the trainer that is killed, until the step under way is done, beside a start of the ranks."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path

import ray
from transformers.utils.logging import disable_progress_bar

from tests.benchmarks.measure import show_machine
from tests.trainer.bench import Bench, put_rows
from tests.trainer.conftest import Ranks
from trinity_data.launch.cluster import own_ray
from trinity_data.processes import compute_environment
from trinity_data.store.store import Store
from trinity_data.synthetic.model import write_model
from trinity_trainer.worker_group import start_trainer

WORLD_SIZE = 2


def bench_trainer(folder: Path, rounds: int) -> None:
    """Two ranks from nothing until their first step is done, and from the kill of one of them in the second
    step, with a checkpoint of the first, until that step is done.
    """
    model = write_model(folder / "model", corpus=["1 + 1 = 2"] * 100, seed=0)
    pairs = [_start_and_kill(model, folder / f"job_{number}") for number in range(rounds + 1)]
    # the first pair warms Ray up
    started, recovered = (statistics.median(times) for times in zip(*pairs[1:], strict=True))
    print(
        f"{WORLD_SIZE} ranks: start and first step {started:.2f} s; one killed, until its step is done "
        f"{recovered:.2f} s, {recovered / started:.2f} x"
    )


def _start_and_kill(model: Path, job: Path) -> tuple[float, float]:
    loop, began = asyncio.new_event_loop(), time.perf_counter()
    group = start_trainer(
        world_size=WORLD_SIZE, num_gpus=0, env=compute_environment(WORLD_SIZE), max_restarts=1
    )
    bench = Bench(
        Ranks({WORLD_SIZE: group}, model, job, loop), job, Store.create_or_open(job / "store"), WORLD_SIZE
    )
    put_rows(bench.store, 2)
    trainer = bench.trainer(save_interval=1)

    async def first_step() -> None:
        await group.load_model(str(model))
        await trainer.replay(await trainer.restore())
        await trainer.train_step(1, bench.store.pending("sft", through_step=1))

    loop.run_until_complete(first_step())
    started = time.perf_counter() - began
    pid = ray.get(group.workers[1].__ray_call__.remote(lambda _: os.getpid()))
    began = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    loop.run_until_complete(trainer.train_step(2, bench.store.pending("sft", through_step=2)))
    recovered = time.perf_counter() - began
    assert bench.store.table("events")["kind"].to_pylist() == ["trainer_died", "trainer_restarted"]
    group.kill()
    bench.store.close()
    loop.close()
    return started, recovered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    show_machine()
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder, own_ray(log_to_driver=False, logging_level="ERROR"):
        bench_trainer(Path(folder), arguments.rounds)


if __name__ == "__main__":
    main()
