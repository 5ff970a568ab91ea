"""Weights from their publishing until an engine has them, beside a copy of the same bytes in memory."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from transformers import AutoModelForCausalLM, Qwen2Config

from tests.benchmarks.measure import Seconds, in_turns, show, show_machine, timed
from tests.nodes import ray_nodes
from trinity_data.nodes import this_node
from trinity_data.synthetic.model import write_model
from trinity_data.weights import WeightFolders, Weights
from trinity_explorer.engines.actor import EngineActor
from trinity_trainer.worker_group import WorkerGroup, start_trainer

LAYERS_OF_500_MB = 9
ENGINE: Mapping[str, Any] = {"dtype": "float32", "max_num_seqs": None}
MEMCPY = "memcpy, into memory that was written before"
MEMCPY_NEW = "memcpy, into new memory"
SHORT = [[5, 6, 7]]


def write_large_model(folder: Path, num_layers: int) -> Path:
    """A Qwen2 of 14.4 million float32 weights a layer, with the tokenizer of the small one."""
    shape = {
        "hidden_size": 1024,
        "intermediate_size": 3328,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    }
    small = write_model(folder / "small", corpus=["What is 3 + 4? The answer is 7."] * 50, seed=0)
    vocab_size = json.loads((small / "config.json").read_text())["vocab_size"]
    config = Qwen2Config(
        num_hidden_layers=num_layers, vocab_size=vocab_size, tie_word_embeddings=True, **shape
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "large")
    for file in (*small.glob("tokenizer*"), small / "generation_config.json"):
        shutil.copy(file, folder / "large")
    return folder / "large"


class Publishing:
    """One rank, the folders of its node and one engine, which is called without the checks of a pool."""

    def __init__(
        self, ranks: WorkerGroup, folders: WeightFolders, engine: Any, runner: asyncio.Runner
    ) -> None:
        self.ranks, self.folders, self.engine, self.runner = ranks, folders, engine, runner
        self.version = 0
        self.writing: Seconds = []
        """Of each version until it has its name. The engine loads them all: only what it has no longer mapped
        is written over.
        """

    def write(self) -> None:
        started = time.perf_counter()
        self.version += 1
        self.runner.run(self.ranks.write_weights(self.folders.draft(self.version)))
        self.folders.publish(self.version)
        self.writing.append(time.perf_counter() - started)

    def write_and_load(self) -> None:
        """Until the engine has it."""
        self.write()
        weights = Weights(self.version, str(self.folders.path(self.version)), node=self.folders.node)
        ray.get(self.engine.load_weights.remote(weights))
        self.folders.remove(before=self.version)

    def write_load_and_score(self) -> None:
        """Until it has computed with all of it once, which reads what is only mapped before."""
        self.write_and_load()
        ray.get(self.engine.score.remote(SHORT))


def measure(publishing: Publishing, num_bytes: int, rounds: int) -> None:
    source, target = np.ones(num_bytes // 4, np.float32), np.ones(num_bytes // 4, np.float32)
    sides = {
        "publish, until the engine has them": publishing.write_and_load,
        "publish, until the engine has scored 3 tokens": publishing.write_load_and_score,
        MEMCPY: lambda: np.copyto(target, source),
        MEMCPY_NEW: source.copy,
    }
    times = in_turns(sides, rounds)
    times["publish alone"] = publishing.writing[2:]  # without the round that warms up
    show(times, ours="publish, until the engine has them", rows=1)
    score = min(timed(lambda: ray.get(publishing.engine.score.remote(SHORT))) for _ in range(3))
    print(f"a score of 3 tokens alone {score * 1e3:.0f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=LAYERS_OF_500_MB)
    args = parser.parse_args()
    show_machine()
    with (
        tempfile.TemporaryDirectory() as folder,
        asyncio.Runner() as runner,
        ray_nodes([2, 2]),
    ):
        model = write_large_model(Path(folder), args.layers)
        num_bytes = (model / "model.safetensors").stat().st_size
        ray.init(log_to_driver=False, logging_level="ERROR")
        ranks = start_trainer(world_size=1, num_gpus=0)
        runner.run(ranks.load_model(str(model)))
        (other,) = {node["NodeID"] for node in ray.nodes()} - {this_node()}
        for nodes, node in (("one node", this_node()), ("two nodes", other)):
            engine = ray.remote(EngineActor).options(
                num_cpus=0,
                max_concurrency=9,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            actor = engine.remote("transformers", str(model), dict(ENGINE), None, "engine_0")
            ray.get(actor.start.remote())
            folders = WeightFolders(Path(folder) / nodes, "memory", this_node())
            print(f"\n{nodes}, {num_bytes / 1e6:.0f} MB", flush=True)
            measure(Publishing(ranks, folders, actor, runner), num_bytes, args.rounds)
            ray.get(actor.close.remote())
            ray.kill(actor)
            folders.close()
        ranks.kill()
    show_machine()


if __name__ == "__main__":
    main()
