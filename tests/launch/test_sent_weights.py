"""A run whose weights go from the ranks to vLLM without a file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.launch.conftest import RunPipeline, rows_of
from tests.launch.test_colocate import SMALL
from tests.launch.test_pair import check_equal
from trinity_data.query.audit import audit

FILE = Path(__file__).parents[2] / "pipelines" / "colocate.yaml"
VLLM = ("buffer.total_steps=4", "explorer.rollout_model.engine_type=vllm", *SMALL)
MODES = pytest.mark.parametrize("mode", ["both", "colocate"])
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@MODES
def test_weights_that_are_sent_make_the_rows_of_those_in_memory(
    run_pipeline: RunPipeline, tmp_path: Path, mode: str
) -> None:
    for method in ("nccl", "memory"):
        run_pipeline(FILE, tmp_path, method, *VLLM, f"mode={mode}", f"synchronizer.sync_method={method}")
    sent, in_memory = (tmp_path / "gsm8k" / name for name in ("nccl", "memory"))
    assert audit(sent).ok
    check_equal(sent, in_memory, steps=4)
    versions = rows_of(sent, "select distinct method, path from model_versions")
    assert versions == [{"method": "nccl", "path": None}]
    assert not list((sent / "weights").glob("*"))


@pytest.mark.gpu
@MODES
def test_two_gpus_send_by_nccl_and_one_by_cuda_ipc(
    run_pipeline: RunPipeline, tmp_path: Path, mode: str
) -> None:
    num_gpus = 2 if mode == "both" else 1
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} GPUs")
    gpus = (f"cluster.gpu_per_node={num_gpus}", "synchronizer.sync_method=nccl")
    run_pipeline(FILE, tmp_path, "nccl", *VLLM, f"mode={mode}", *gpus)
    job = tmp_path / "gsm8k" / "nccl"
    assert audit(job).ok
    (found,) = rows_of(job, "select max(metrics['probe/logprob_diff_mean']) as mean from steps")
    assert found["mean"] < 0.05
    assert rows_of(job, "select distinct method from model_versions") == [{"method": "nccl"}]
