from __future__ import annotations

import json
from pathlib import Path

import pytest

from trinity_data.config import RunConfig, load_pipeline_file
from trinity_data.errors import StoreLockedError
from trinity_data.launch.job_folder import (
    job_folder,
    new_name_if_not_continued,
    write_configuration,
)

FILE = Path(__file__).with_name("fake.yaml")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    return load_pipeline_file(FILE)


def test_the_folder_holds_the_resolved_configuration(config: RunConfig, tmp_path: Path) -> None:
    with job_folder(config) as folder:
        assert folder == tmp_path / "tests" / "fake"
        # a start that is refused later leaves the one of the last start
        assert not (folder / "config.json").exists()
        write_configuration(config, folder)
        written = json.loads((folder / "config.json").read_text())
    assert [stage["stage_name"] for stage in written["stages"]] == ["warmup", "grpo"]
    assert written["stages"][1]["buffer"]["train_batch_size"] == 32


def test_a_second_run_of_the_same_job_is_refused_while_the_first_goes_on(config: RunConfig) -> None:
    with (
        job_folder(config),
        pytest.raises(
            StoreLockedError, match=r"tests/fake is in use by process \d+; wait for it, stop it, or give"
        ),
        job_folder(config),
    ):
        pass
    with job_folder(config) as folder:
        assert folder.exists()


def test_a_run_that_shall_not_go_on_gets_a_name_of_its_own(config: RunConfig) -> None:
    fresh = config.model_copy(update={"continue_from_checkpoint": False})
    assert new_name_if_not_continued(fresh) is fresh
    config.job_dir.mkdir(parents=True)
    assert new_name_if_not_continued(config) is config
    renamed = new_name_if_not_continued(fresh)
    assert renamed.name.startswith("fake_20") and len(renamed.name) == len("fake_") + 14
    assert renamed.file == config.file
