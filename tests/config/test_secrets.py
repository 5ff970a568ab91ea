"""Secrets stay out of messages and of what a run writes down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trinity_data.config import load_pipeline_file
from trinity_data.config.secrets import is_secret_key
from trinity_data.errors import ConfigError
from trinity_data.launch.job_folder import job_folder, write_configuration

FILE = """
project: tests
name: secrets
checkpoint_root_dir: runs
algorithm: {algorithm_type: grpo}
model: {model_path: synthetic://qwen2-1m, max_prompt_tokens: 48, max_response_tokens: 16}
buffer:
  batch_size: 4
  default_workflow_type: math_workflow
  explorer_input:
    taskset:
      path: synthetic://gsm8k
      workflow_args: {judge: "Bearer ${oc.env:JUDGE_TOKEN}", prompt_key: question}
explorer:
  env_vars: {OPENAI_API_KEY: sk-written-here, PLAIN: shown}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUDGE_TOKEN", "hunter2-from-the-environment")
    (tmp_path / "pipeline.yaml").write_text(FILE)
    return tmp_path / "pipeline.yaml"


@pytest.mark.parametrize("name", ["api_key", "OPENAI_API_KEY", "token", "hf_token", "db_password", "secret"])
def test_names_of_secrets(name: str) -> None:
    assert is_secret_key(name)


@pytest.mark.parametrize(
    "name", ["prompt_key", "response_key", "max_tokens", "total_tokens", "key", "author"]
)
def test_names_that_only_look_like_it(name: str) -> None:
    assert not is_secret_key(name)


def test_the_configuration_of_a_job_holds_no_secret_and_is_its_owners_own(file: Path) -> None:
    config = load_pipeline_file(file)
    with job_folder(config) as folder:
        write_configuration(config, folder)
        written = folder / "config.json"
    assert written.stat().st_mode & 0o777 == 0o600
    text = written.read_text()
    assert "hunter2" not in text and "sk-written" not in text
    (stage,) = json.loads(text)["stages"]
    assert stage["explorer"]["env_vars"] == {"OPENAI_API_KEY": "********", "PLAIN": "shown"}
    args = stage["buffer"]["explorer_input"]["taskset"]["workflow_args"]
    assert args == {"judge": "Bearer ********", "prompt_key": "question"}


def test_the_run_itself_has_the_values(file: Path) -> None:
    (stage,) = load_pipeline_file(file).stages
    taskset = stage.buffer.explorer_input.taskset
    assert taskset is not None
    assert taskset.workflow_args["judge"] == "Bearer hunter2-from-the-environment"
    assert stage.explorer.env_vars["OPENAI_API_KEY"] == "sk-written-here"


@pytest.mark.parametrize(
    "override",
    [
        "buffer.batch_size=${oc.env:JUDGE_TOKEN}",
        "algorithm.algorithm_type=x-${oc.env:JUDGE_TOKEN}",
        "explorer.rollout_model.api_key=sk-given-above",
        "explorer.api_key=sk-given-above",
        "monitor={monitor_type: wandb, monitor_args: {api_key: [sk-given-above]}}",
    ],
)
def test_a_refused_value_is_not_shown(file: Path, override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_pipeline_file(file, [override])
    assert "hunter2" not in str(caught.value) and "sk-given" not in str(caught.value)


def test_a_variable_that_is_not_set_is_shown_by_its_name(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_TOKEN")
    with pytest.raises(ConfigError, match="the environment variable JUDGE_TOKEN is not set"):
        load_pipeline_file(file)
