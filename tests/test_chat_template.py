"""Chat templates that are missing, raise, know other roles or never end, and the limit that ends them."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest

from trinity_data.chat_template import render
from trinity_data.deadline import deadline
from trinity_data.errors import TemplateError
from trinity_data.tokenizer import load_tokenizer

ENDLESS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor "
    "%}{% endfor %}"
)
USER = [{"role": "user", "content": "2 + 3"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(str(tiny_model))


def test_a_prompt_ends_where_the_answer_begins(tokenizer: Any) -> None:
    text = render(tokenizer, USER, None)
    assert text == "<|im_start|>user\n2 + 3<|im_end|>\n<|im_start|>assistant\n"
    assert render(tokenizer, USER, "{{ messages[0]['content'] }} =") == "2 + 3 ="


def test_a_template_that_does_not_end_is_ended(tokenizer: Any) -> None:
    with pytest.raises(TemplateError, match=r"model.custom_chat_template does not end: no end after 0.3 s"):
        render(tokenizer, USER, ENDLESS, seconds=0.3)
    # and leaves nothing behind
    assert render(tokenizer, USER, "ok", seconds=5) == "ok"


def test_a_role_that_the_template_does_not_know_is_named(tokenizer: Any) -> None:
    messages = [*USER, {"role": "tool", "content": "5"}]
    with pytest.raises(TemplateError, match="of the roles user, tool: TemplateError: unknown role 'tool'"):
        render(tokenizer, messages, None)


def test_a_template_with_a_fault_is_told_as_one(tokenizer: Any) -> None:
    with pytest.raises(TemplateError, match="TemplateSyntaxError"):
        render(tokenizer, USER, "{% for %}")
    with pytest.raises(TemplateError, match="custom_chat_template fails for a message of the role user"):
        render(tokenizer, USER, "{{ messages[0]['content'] + 1 }}")


def test_a_missing_template_is_told_with_what_to_do(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = None
    with pytest.raises(TemplateError, match=r"has no chat template.*write model.custom_chat_template"):
        render(tokenizer, USER, None)


def test_a_deadline_leaves_code_alone_that_ends_in_time() -> None:
    for _ in range(200):
        with deadline(30):
            pass
    with deadline(30), pytest.raises(KeyError):
        {}["a"]


def test_a_deadline_interrupts_code_that_catches_every_exception() -> None:
    def stubborn() -> None:
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0.001)

    with pytest.raises(TimeoutError, match=r"no end after 0.2 s"), deadline(0.2):
        stubborn()
