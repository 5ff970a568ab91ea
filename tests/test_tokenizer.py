from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from trinity_data.tokenizer import load_tokenizer, vocabulary

TEXTS = ("Ann has 12 apples.", "  two  spaces\n", "ünïcödé ✓", "<|im_start|>user\n3+4<|im_end|>")


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
