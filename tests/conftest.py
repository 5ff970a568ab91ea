"""What many tests need once: a tiny model and task set on disk, and one Ray for the whole session."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(scope="session")
def taskset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.jsonl and test.jsonl in GSM8K's shape."""
    from trinity_data.synthetic.taskset import write_taskset

    return write_taskset(tmp_path_factory.mktemp("taskset") / "gsm8k", seed=0)


@pytest.fixture(scope="session")
def tiny_model(taskset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen2 with random weights, as an ordinary Hugging Face folder."""
    from trinity_data.synthetic.model import write_model

    rows = [json.loads(line) for line in (taskset / "train.jsonl").read_text().splitlines()[:500]]
    corpus = [text for row in rows for text in (row["question"], row["answer"])]
    return write_model(tmp_path_factory.mktemp("model") / "tiny", corpus=corpus, seed=0)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One local Ray, on the loopback interface."""
    import ray

    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=256 * 2**20,
        _node_ip_address="127.0.0.1",
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def shared_gsm8k() -> Path:
    """The real GSM8K where it lies beside the project."""
    folder = SHARED / "gsm8k"
    if not folder.exists():
        pytest.skip("../shared/gsm8k is not there")
    return folder
