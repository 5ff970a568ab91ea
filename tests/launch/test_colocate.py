"""Engines and trainer that take turns make what they make beside each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.conftest import RunPipeline, rows_of
from tests.launch.test_pair import check_equal
from trinity_data.query.audit import audit

FILE = Path(__file__).parents[2] / "pipelines" / "colocate.yaml"
SMALL = ("buffer.batch_size=4", "algorithm.repeat_times=4", "monitor.monitor_type=none")
FAKE = ("buffer.total_steps=4", "explorer.rollout_model.engine_type=fake", *SMALL)


def test_explorer_and_trainer_take_turns(run_pipeline: RunPipeline, tmp_path: Path) -> None:
    run_pipeline(FILE, tmp_path, "turns", *FAKE)
    check_run(tmp_path / "gsm8k" / "turns", 4)


@pytest.mark.slow
def test_turns_change_nothing_of_what_is_made(run_pipeline: RunPipeline, tmp_path: Path) -> None:
    run_pipeline(FILE, tmp_path, "turns", *FAKE)
    run_pipeline(FILE, tmp_path, "beside", "mode=both", *FAKE)
    turns, beside = (tmp_path / "gsm8k" / name for name in ("turns", "beside"))
    check_equal(turns, beside, steps=4)


def check_run(job: Path, steps: int) -> None:
    assert audit(job).ok
    made = rows_of(
        job, "select step, model_version as version from experiences group by all order by step, version"
    )
    assert made == [{"step": step, "version": (step - 1) // 2 * 2} for step in range(1, steps + 1)]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_an_engine_with_a_model_takes_turns_with_the_trainer(
    run_pipeline: RunPipeline, tmp_path: Path, engine: str
) -> None:
    of_engine = f"explorer.rollout_model.engine_type={engine}"
    run_pipeline(FILE, tmp_path, "run", "buffer.total_steps=4", of_engine, *SMALL)
    check_run(tmp_path / "gsm8k" / "run", 4)


@pytest.mark.gpu
@pytest.mark.slow
def test_one_gpu_is_enough_for_engine_and_trainer(run_pipeline: RunPipeline, tmp_path: Path) -> None:
    """The engine asks for most of the GPU at its start, and the trainer has it after that."""
    one = ("cluster.gpu_per_node=1", "explorer.rollout_model.engine_type=vllm")
    run_pipeline(FILE, tmp_path, "run", "buffer.total_steps=4", *one, *SMALL)
    check_run(tmp_path / "gsm8k" / "run", 4)
    (used,) = rows_of(tmp_path / "gsm8k" / "run", "select count(*) as versions from model_versions")
    assert used["versions"] >= 2
