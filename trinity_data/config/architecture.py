"""What a model's `config.json` says of its architecture, read without importing what would build it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trinity_data.config import machine


@dataclass(frozen=True)
class Architecture:
    """Of a causal language model."""

    name: str
    """`Qwen2ForCausalLM`; the model's type where the file names no class."""
    vocab_size: int | None
    """Rows of the embedding."""


def read_architecture(model_path: str) -> Architecture | None:
    """Of a folder, or of a hub id that the cache holds; None where there is no readable `config.json`."""
    file = _config_file(model_path)
    try:
        config = json.loads(file.read_text()) if file is not None else None
    except (OSError, ValueError):
        return None
    return _architecture(config) if isinstance(config, dict) else None


def _config_file(model_path: str) -> Path | None:
    folder = Path(model_path).expanduser()
    if folder.is_dir():
        return folder / "config.json"
    return machine.cached_model_file(model_path, "config.json")


def _architecture(config: dict[str, Any]) -> Architecture:
    # a model of text and images keeps what is said of its language part apart
    text = config.get("text_config")
    language = text if isinstance(text, dict) else config
    names = config.get("architectures") or [config.get("model_type", "unknown")]
    size = language.get("vocab_size", config.get("vocab_size"))
    return Architecture(
        name=str(names[0]),
        vocab_size=size if isinstance(size, int) else None,
    )
