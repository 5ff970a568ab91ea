"""A store, a tokenizer, tasks and the fake engine, as the explorer's tests need them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trinity_data.pipeline.task import Task
from trinity_data.store.store import Store
from trinity_data.tokenizer import load_tokenizer
from trinity_explorer.engines.engine import Sampling
from trinity_explorer.model import ChatTemplate

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, min_tokens=0, max_tokens=32, seed=0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.create_or_open(tmp_path / "store")
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(str(tiny_model))


@pytest.fixture
def template(tokenizer: Any) -> ChatTemplate:
    return ChatTemplate(tokenizer, None, max_prompt_tokens=128, truncate=False)


@pytest.fixture
def sampling() -> Sampling:
    return SAMPLING


@pytest.fixture
def task() -> Task:
    messages = ({"role": "user", "content": "What is 3 + 4?"},)
    return Task("t", "sums", "What is 3 + 4?", messages, "#### 7", "math_workflow", "")
