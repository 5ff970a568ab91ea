"""Parts of a run that are killed, until they work again, beside their start from nothing."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.benchmarks.measure import show_machine
from trinity_data.config import RolloutModelConfig
from trinity_data.launch.cluster import own_ray
from trinity_data.processes import descendants
from trinity_data.synthetic.model import write_model, write_weights
from trinity_data.tokenizer import load_tokenizer
from trinity_data.weights import Weights
from trinity_explorer.engines.actor import RemoteEngine
from trinity_explorer.engines.engine import Request, Sampling
from trinity_explorer.engines.pool import EnginePool, build_engines

CORPUS = ["What is 3 + 4? The answer is 7."] * 50
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, min_tokens=64, max_tokens=64, seed=0)


async def engine_seconds(
    engine_type: str, model: Path, weights: Weights, rounds: int
) -> dict[str, list[float]]:
    """From nothing, and from the kill of the process that samples, each to the first completion."""
    times: dict[str, list[float]] = {"started from nothing": [], "killed, until a request is answered": []}
    for _ in range(rounds):
        started = time.perf_counter()
        pool = await build_engines(
            RolloutModelConfig(engine_type=engine_type, seed=1),  # type: ignore[arg-type]
            max_model_len=256,
            model_path=str(model),
            tokenizer=load_tokenizer(str(model)),
            num_gpus=0,
            env={},
            max_restarts=1,
        )
        await pool.load_weights(weights)
        await pool.generate([Request([5, 6, 7], SAMPLING)])
        times["started from nothing"].append(time.perf_counter() - started)
        process = await sampling_process(pool)
        under_way = asyncio.create_task(pool.generate([Request([5, 6, 7], SAMPLING)]))
        await asyncio.sleep(0.02)
        started = time.perf_counter()
        os.kill(process, signal.SIGKILL)
        await under_way
        times["killed, until a request is answered"].append(time.perf_counter() - started)
        await pool.close()
    return times


async def sampling_process(pool: EnginePool) -> int:
    """vLLM's own below the actor, else the actor."""
    engine = pool.engines[0].engine
    assert isinstance(engine, RemoteEngine)
    actor = int(await engine.actor.__ray_call__.remote(lambda self: os.getpid()))
    return [actor, *descendants(actor)][-1]


def show_seconds(part: str, times: Mapping[str, Sequence[float]]) -> None:
    """Medians, with the range, and how many times the first one the others take."""
    first = statistics.median(next(iter(times.values())))
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        print(
            f"{part:14} {name:40} {middle:7.2f} s  ({min(seconds):.2f} to {max(seconds):.2f})"
            f"{middle / first:7.2f} x",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    show_machine()
    with tempfile.TemporaryDirectory() as folder, own_ray(log_to_driver=False, logging_level="ERROR"):
        model = write_model(Path(folder) / "tiny", corpus=CORPUS, seed=0)
        newest = Path(folder) / "version_1"
        write_weights(newest, vocab_size=len(load_tokenizer(str(model))), seed=1)
        for engine_type in ("transformers", "vllm"):
            if importlib.util.find_spec(engine_type) is not None:
                times = asyncio.run(engine_seconds(engine_type, model, Weights(1, str(newest)), rounds))
                show_seconds(engine_type, times)
    show_machine()


if __name__ == "__main__":
    main()
