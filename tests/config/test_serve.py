"""What a pipeline file of mode `serve` may say."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_data.config import load_pipeline_file
from trinity_data.config.diagnostics import Diagnostics
from trinity_data.config.preflight import add_what_the_machine_lacks
from trinity_data.errors import ConfigError

ROOT = Path(__file__).parents[2]
ENDPOINT = ROOT / "pipelines" / "serve" / "explorer.yaml"


def refusal(*overrides: str, file: Path = ENDPOINT) -> str:
    with pytest.raises(ConfigError) as caught:
        load_pipeline_file(file, list(overrides))
    return str(caught.value)


def test_an_endpoint_is_the_explorer_of_a_run_and_has_no_tasks_of_its_own() -> None:
    (stage,) = load_pipeline_file(ENDPOINT).stages
    assert (stage.part, stage.explores, stage.trains, stage.explored_tasksets) == (
        "explorer:explorer", True, False, [],
    )  # fmt: skip
    assert stage.explorer.listen_address == "127.0.0.1"


@pytest.mark.parametrize(
    "written",
    [
        "buffer.explorer_input.taskset={path: a}",
        "explorer.over_rollout={ratio: 0.5}",
        "explorer.refill_rounds=1",
        "data_processor.task_pipeline={operators: [{name: text_length_filter}]}",
    ],
)
def test_what_is_said_of_tasks_is_refused_as_there_are_none(written: str) -> None:
    key = written.split("=")[0]
    assert f"{key}: has no effect with mode 'serve', whose tasks are what agents" in refusal(written)


def test_keys_of_an_endpoint_elsewhere_are_noted() -> None:
    run = load_pipeline_file(ROOT / "pipelines" / "async" / "explorer.yaml", ["explorer.proxy_port=8011"])
    assert any(
        "proxy_port: has no effect with mode 'explore', only with 'serve'" in note for note in run.notes
    )


def test_tokens_are_cut_only_as_vllm_can_name_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinity_data.config.preflight.choose_engine_type", lambda kind: "vllm")
    run = load_pipeline_file(ENDPOINT, ["model.top_p=0.9"])
    diagnostics = Diagnostics(run.yaml_file)
    add_what_the_machine_lacks(run, diagnostics)
    with pytest.raises(ConfigError, match=r"model\.top_p: found 0.9 without top_k"):
        diagnostics.raise_if_any()
