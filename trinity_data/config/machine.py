"""What this machine has, found without importing anything heavy:
GPUs, files of the Hugging Face cache, the hub.
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_WEIGHTS = ("*.safetensors", "*.bin")
_DATA = ("*.parquet", "*.jsonl", "*.json", "*.csv", "*.arrow")


def count_gpus() -> int:
    """NVIDIA GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [] if visible is None else [name for name in visible.split(",") if name.strip() not in ("", "-1")]
    if visible is not None and not names:
        return 0
    installed = _installed_gpus()
    return installed if visible is None else min(installed, len(names))


def first_gpus(count: int) -> str:
    """`CUDA_VISIBLE_DEVICES` for the first `count` GPUs that this process may use; empty for none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(n) for n in range(count)] if visible is None else visible.split(",")
    return ",".join(name.strip() for name in names[:count])


def _installed_gpus() -> int:
    listed = Path("/proc/driver/nvidia/gpus")
    if listed.is_dir():
        return sum(1 for _ in listed.iterdir())
    try:
        printed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in printed.splitlines())


def hub_is_reachable(*, timeout_seconds: float = 1.0) -> bool:
    """Whether the Hugging Face hub answers; never asked where HF_HUB_OFFLINE says so."""
    if any(
        os.environ.get(name, "").upper() in ("1", "TRUE", "YES", "ON")
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    ):
        return False
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    proxy = urlsplit(
        os.environ.get(f"{endpoint.scheme}_proxy", os.environ.get(f"{endpoint.scheme.upper()}_PROXY", ""))
    )
    target = proxy if proxy.hostname else endpoint
    port = target.port or (443 if target.scheme == "https" else 80)
    try:
        socket.create_connection((target.hostname or "", port), timeout=timeout_seconds).close()
    except OSError:
        return False
    return True


def looks_like_a_hub_id(path: str) -> bool:
    """`name` or `owner/name`; anything else can only be a path."""
    return _HUB_ID.fullmatch(path) is not None


def is_in_hub_cache(hub_id: str, kind: Literal["models", "datasets"]) -> bool:
    """Whether the Hugging Face cache holds weights of the model, or files of the data set."""
    folder = _hub_cache() / f"{kind}--{hub_id.replace('/', '--')}" / "snapshots"
    patterns = _WEIGHTS if kind == "models" else _DATA
    if any(next(folder.glob(f"**/{pattern}"), None) for pattern in patterns):
        return True
    prepared = _hf_home("HF_DATASETS_CACHE", "datasets") / hub_id.replace("/", "___").lower()
    return kind == "datasets" and next(prepared.glob("**/*.arrow"), None) is not None


def cached_model_file(hub_id: str, name: str) -> Path | None:
    """A file of the newest snapshot of a model in the Hugging Face cache."""
    snapshots = _hub_cache() / f"models--{hub_id.replace('/', '--')}" / "snapshots"
    found = sorted(snapshots.glob(f"*/{name}"), key=lambda file: file.stat().st_mtime)
    return found[-1] if found else None


def hub_revision(hub_id: str, kind: Literal["models", "datasets"]) -> str:
    """The commit that the cache holds as `main`, or the id alone where it holds none."""
    head = _hub_cache() / f"{kind}--{hub_id.replace('/', '--')}" / "refs" / "main"
    try:
        return f"{hub_id}@{head.read_text().strip()}"
    except OSError:
        return hub_id


def _hub_cache() -> Path:
    return _hf_home("HF_HUB_CACHE", "hub")


def _hf_home(variable: str, below: str) -> Path:
    if variable in os.environ:
        return Path(os.environ[variable]).expanduser()
    home = os.environ.get("HF_HOME")
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "huggingface"
    return (Path(home).expanduser() if home else cache) / below


def can_import(module: str) -> bool:
    """Whether the module is installed; it is not imported."""
    return importlib.util.find_spec(module) is not None
