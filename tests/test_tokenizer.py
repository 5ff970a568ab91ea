from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trinity_data.errors import TemplateError
from trinity_data.tokenizer import ChatTemplate, load_tokenizer, vocabulary

TEXTS = ("Ann has 12 apples.", "  two  spaces\n", "ünïcödé ✓", "<|im_start|>user\n3+4<|im_end|>")
ENDLESS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor "
    "%}{% endfor %}"
)
USER = [{"role": "user", "content": "2 + 3"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(str(tiny_model))


def test_it_cuts_text_as_auto_tokenizer_does(tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(str(tiny_model)), AutoTokenizer.from_pretrained(tiny_model)
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    assert (ours.eos_token_id, ours.chat_template) == (theirs.eos_token_id, theirs.chat_template)


def test_a_plain_class_is_loaded_without_torch(tiny_model: Path) -> None:
    code = (
        f"import sys; from trinity_data.tokenizer import load_tokenizer as l; l({str(tiny_model)!r}); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_any_other_class_goes_the_long_way(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(tiny_model, folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "GPT2Tokenizer"}))
    assert load_tokenizer(str(folder)).decode(load_tokenizer(str(folder)).encode("12 apples")) == "12 apples"


def test_the_vocabulary_has_the_text_of_every_token(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    texts = vocabulary(tokenizer)["text"].to_pylist()
    assert len(texts) == len(tokenizer)
    ids = tokenizer.encode("Ann has 12 apples.", add_special_tokens=False)
    assert "".join(texts[i] for i in ids) == "Ann has 12 apples."
    assert texts[tokenizer.eos_token_id] == "<|im_end|>"


def test_a_prompt_ends_where_the_answer_begins(tokenizer: Any) -> None:
    text = ChatTemplate(tokenizer, None).render(USER)
    assert text == "<|im_start|>user\n2 + 3<|im_end|>\n<|im_start|>assistant\n"
    assert ChatTemplate(tokenizer, "{{ messages[0]['content'] }} =").render(USER) == "2 + 3 ="


def test_a_template_that_does_not_end_is_ended(tokenizer: Any) -> None:
    with pytest.raises(TemplateError, match=r"model.custom_chat_template does not end: no end after 0.3 s"):
        ChatTemplate(tokenizer, ENDLESS, seconds=0.3).render(USER)
    # and leaves nothing behind
    assert ChatTemplate(tokenizer, "ok", seconds=5).render(USER) == "ok"


def test_a_role_that_the_template_does_not_know_is_named(tokenizer: Any) -> None:
    messages = [*USER, {"role": "tool", "content": "5"}]
    with pytest.raises(TemplateError, match="of the roles user, tool: TemplateError: unknown role 'tool'"):
        ChatTemplate(tokenizer, None).render(messages)


def test_a_template_with_a_fault_is_reported_as_one(tokenizer: Any) -> None:
    with pytest.raises(TemplateError, match="TemplateSyntaxError"):
        ChatTemplate(tokenizer, "{% for %}").render(USER)
    with pytest.raises(TemplateError, match="custom_chat_template fails for a message of the role user"):
        ChatTemplate(tokenizer, "{{ messages[0]['content'] + 1 }}").render(USER)


def test_a_missing_template_is_reported_with_what_to_do(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = None
    with pytest.raises(TemplateError, match=r"has no chat template.*write model.custom_chat_template"):
        ChatTemplate(tokenizer, None).render(USER)
