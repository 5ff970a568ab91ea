"""Loading a tokenizer without loading torch where that can be done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from trinity_data.schema import TABLES

# the classes that hold nothing but what tokenizer.json says
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend", "Qwen2Tokenizer", "Qwen2TokenizerFast")


def load_tokenizer(model_path: str) -> Any:
    """The tokenizer of a Hugging Face folder or hub id.

    `AutoTokenizer` imports torch, seconds of work;
    a folder whose tokenizer is of a plain class does without it.
    """
    if _tokenizer_class(Path(model_path)) in PLAIN_CLASSES:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(model_path)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)


def vocabulary(tokenizer: Any) -> pa.Table:
    """The text of every token by itself, as the table `vocabulary`."""
    ids = range(len(tokenizer))
    texts = tokenizer.backend_tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=False)
    return pa.table({"token_id": pa.array(ids, pa.int32()), "text": texts}, schema=TABLES["vocabulary"])


def _tokenizer_class(folder: Path) -> str | None:
    file = folder / "tokenizer_config.json"
    if not (folder / "tokenizer.json").exists() or not file.exists():
        return None
    name = json.loads(file.read_text()).get("tokenizer_class")
    return name if isinstance(name, str) else None
