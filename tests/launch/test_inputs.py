from __future__ import annotations

from pathlib import Path

import pytest

from trinity_data.config import RunConfig, load_pipeline_file
from trinity_data.dataset.reader import Source
from trinity_data.launch.inputs import RunInputs
from trinity_data.weights import mark_latest

pytestmark = pytest.mark.usefixtures("environment")

FILE = Path(__file__).with_name("fake.yaml")


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    # else it would be set for the rest of the process
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def config(*overrides: str) -> RunConfig:
    return load_pipeline_file(FILE, list(overrides))


def test_synthetic_names_become_folders_that_are_made_once(tmp_path: Path) -> None:
    run = config()
    resources = RunInputs(run)
    model = Path(resources.model_path)
    assert model.parent == run.job_dir / "synthetic"
    assert (model / "model.safetensors").exists() and (model / "tokenizer.json").exists()
    taskset = run.stages[1].buffer.explorer_input.taskset
    assert taskset is not None
    spec = resources.source(taskset)
    assert set(Source(spec).columns()) >= {"question", "answer"}
    before = (model / "model.safetensors").stat().st_mtime_ns
    assert RunInputs(run).model_path == str(model)
    assert (model / "model.safetensors").stat().st_mtime_ns == before


def test_a_limit_and_a_split_come_along(taskset: Path, tiny_model: Path) -> None:
    run = config(
        f"model.model_path={tiny_model}",
        f"buffer.explorer_input.taskset.path={taskset}",
    )
    held_out = run.stages[1].buffer.explorer_input.eval_tasksets[0]
    spec = RunInputs(run).source(held_out)
    assert (spec.path, spec.split, spec.limit) == (str(taskset), "test", 16)


def test_a_runs_folder_stands_for_its_newest_weights(taskset: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    mark_latest(other, 30)
    run = config(f"model.model_path={other}", f"buffer.explorer_input.taskset.path={taskset}")
    assert RunInputs(run).model_path == str(other / "global_step_30" / "actor" / "huggingface")
