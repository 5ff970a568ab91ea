"""What a model's `config.json` says of its architecture, read without importing what would build it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from trinity_data.config.hub import cached_snapshot, looks_like_a_hub_id


@dataclass(frozen=True)
class Architecture:
    """Of a causal language model."""

    name: str
    """`Qwen2ForCausalLM`; the model's type where the file names no class."""
    vocab_size: int | None
    """Rows of the embedding."""


def read_architecture(model_path: str) -> Architecture | None:
    """Of a folder, or of a hub id that the cache holds; None where there is no readable `config.json`."""
    folder: Path | None = Path(model_path).expanduser()
    if folder is not None and not folder.is_dir():
        folder = cached_snapshot(model_path, "model") if looks_like_a_hub_id(model_path) else None
    try:
        config = json.loads((folder / "config.json").read_text()) if folder is not None else None
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    # a model of text and images keeps what is said of its language part apart
    text = config.get("text_config")
    language = text if isinstance(text, dict) else config
    names = config.get("architectures") or [config.get("model_type", "unknown")]
    size = language.get("vocab_size", config.get("vocab_size"))
    return Architecture(name=str(names[0]), vocab_size=size if isinstance(size, int) else None)
