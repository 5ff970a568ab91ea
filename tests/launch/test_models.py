"""A model that would fail in every step is told before the first: template, end token, vocabulary."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.small_pipelines import EXPLORING
from trinity_data.config import load_pipeline_file
from trinity_data.errors import ConfigError
from trinity_data.launch.models import check_model, model_can_be_used
from trinity_data.tokenizer import load_tokenizer

PIPELINE = EXPLORING.replace("synthetic://gsm8k", "tasks.jsonl")

Findings = Callable[..., list[tuple[str, str]]]


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.fixture
def diagnostics(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Findings:
    """`findings(*overrides)`: key and text of each problem."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"question": "2 + 3", "answer": "5"}) + "\n")

    def look(*overrides: str) -> list[tuple[str, str]]:
        file = tmp_path / "pipeline.yaml"
        file.write_text(PIPELINE.replace("synthetic://qwen2-1m", str(model)))
        config = load_pipeline_file(file, overrides)
        found = [each for stage in config.stages for each in model_can_be_used(stage)]
        return [(".".join(map(str, each.path)), each.message) for each in found]

    return look


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_sound_model_has_no_problem(diagnostics: Findings) -> None:
    assert diagnostics() == []


def test_a_missing_chat_template_is_reported_and_one_in_the_file_replaces_it(
    diagnostics: Findings, model: Path
) -> None:
    (model / "chat_template.jinja").unlink()
    ((key, text),) = diagnostics()
    assert key == "model.model_path" and "has no chat template" in text
    assert diagnostics("model.custom_chat_template='{{ messages[0].content }}'") == []


def test_a_role_that_the_template_does_not_know_is_reported_where_the_data_has_it(
    diagnostics: Findings, model: Path, tmp_path: Path
) -> None:
    only_users = (
        "{% for m in messages %}{% if m['role'] != 'user' %}{{ raise_exception('only users') }}{% endif %}{{ "
        "m['content'] }}{% endfor %}"
    )
    (model / "chat_template.jinja").write_text(only_users)
    assert diagnostics() == []
    ((key, text),) = diagnostics("buffer.explorer_input.taskset.format.system_prompt=Add.")
    assert key == "model.model_path" and "roles system, user: TemplateError: only users" in text
    chats = [
        [{"role": "user", "content": "2 + 3"}],
        [{"role": "tool", "content": "5"}, {"role": "user", "content": "2 + 3"}],
    ]
    (tmp_path / "chats.jsonl").write_text(
        "".join(json.dumps({"messages": c, "answer": "5"}) + "\n" for c in chats)
    )
    taskset = "buffer.explorer_input.taskset"
    form = "{prompt_type: messages, messages_key: messages, response_key: answer}"
    ((_, text),) = diagnostics(f"{taskset}.path=chats.jsonl", f"{taskset}.format={form}")
    assert "roles tool, user" in text


def test_a_tokenizer_without_an_end_token_is_reported(diagnostics: Findings, model: Path) -> None:
    change(model / "tokenizer_config.json", eos_token=None)
    ((key, text),) = diagnostics()
    assert key == "model.model_path" and "names no end token" in text and "tokenizer_config.json" in text


def test_a_vocabulary_larger_than_the_embedding_is_reported_with_both_sizes(
    diagnostics: Findings, model: Path
) -> None:
    size = len(load_tokenizer(str(model)))
    change(model / "config.json", vocab_size=size - 2)
    ((key, text),) = diagnostics()
    assert key == "model.model_path"
    assert f"has {size} tokens, its embedding {size - 2}" in text and "and 1 more would fail" in text
    change(model / "config.json", vocab_size=size + 60)
    assert diagnostics() == []


def test_a_tokenizer_that_cannot_be_read_is_reported(diagnostics: Findings, model: Path) -> None:
    (model / "tokenizer.json").write_text("{")
    ((_, text),) = diagnostics()
    assert "its tokenizer cannot be loaded" in text


def test_what_comes_from_the_hub_is_checked_when_it_is_here(model: Path, tmp_path: Path) -> None:
    (model / "chat_template.jinja").unlink()
    file = tmp_path / "pipeline.yaml"
    file.write_text(PIPELINE.replace("synthetic://qwen2-1m", "someone/somewhere"))
    config = load_pipeline_file(file, [])
    assert list(model_can_be_used(config.stages[0])) == []
    with pytest.raises(ConfigError, match=r"model\.model_path: the tokenizer has no chat template"):
        check_model(config.stages, str(model), load_tokenizer(str(model)))
