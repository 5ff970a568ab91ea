"""Models and data sets of the Hugging Face hub: which of them are in its cache, and whether it answers.

huggingface_hub is imported where it is asked, so that a file without hub ids does not pay for it.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_CONTENTS = {
    "model": ("*.safetensors", "*.bin"),
    "dataset": ("*.parquet", "*.jsonl", "*.json", "*.csv", "*.arrow"),
}

RepoType = Literal["model", "dataset"]


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


def cached_snapshot(hub_id: str, kind: RepoType) -> Path | None:
    """The folder that the cache holds as `main`, named by its commit; None where it holds none."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            hub_id, repo_type=kind, cache_dir=constants.HF_HUB_CACHE, local_files_only=True
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return Path(str(folder))


def is_in_hub_cache(hub_id: str, kind: RepoType) -> bool:
    """Whether the cache holds weights of the model, or files of the data set."""
    from huggingface_hub import constants

    snapshot = cached_snapshot(hub_id, kind)
    if snapshot and any(next(snapshot.rglob(pattern), None) for pattern in _CONTENTS[kind]):
        return True
    # `datasets` keeps a copy of its own in Arrow
    arrow = Path(os.environ.get("HF_DATASETS_CACHE", f"{constants.HF_HOME}/datasets")).expanduser()
    prepared = arrow / hub_id.replace("/", "___").lower()
    return kind == "dataset" and next(prepared.rglob("*.arrow"), None) is not None


def hub_revision(hub_id: str, kind: RepoType) -> str:
    """`id@commit` of what the cache holds as `main`, or the id alone where it holds none."""
    snapshot = cached_snapshot(hub_id, kind) if looks_like_a_hub_id(hub_id) else None
    return f"{hub_id}@{snapshot.name}" if snapshot else hub_id
