"""Folders that are made once and then only read.

A folder is there whole or not at all: it is filled under another name, then renamed. It carries the
parameters it was made from in a hidden file, so that the same request finds it again and another request is
refused.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from trinity_data.atomic import fsync_path
from trinity_data.errors import ConfigError

PARAMETERS_FILE = ".synthetic.json"
"""Hidden, so that `datasets` does not take it for rows."""

Parameters = Mapping[str, str | int]


def make_once(folder: Path, parameters: Parameters, fill: Callable[[Path], None]) -> Path:
    """`folder` as `fill` left it; filled by the first process that comes."""
    if folder.exists():
        return _reuse(folder, parameters)
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        draft.chmod(0o755)  # mkdtemp lets nobody else read
        fill(draft)
        (draft / PARAMETERS_FILE).write_text(json.dumps(dict(parameters), sort_keys=True) + "\n")
        _sync(draft)
        return _publish(draft, folder, parameters)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _publish(draft: Path, folder: Path, parameters: Parameters) -> Path:
    try:
        draft.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        return _reuse(folder, parameters)  # another process was faster
    fsync_path(folder.parent)
    return folder


def _reuse(folder: Path, parameters: Parameters) -> Path:
    found = _parameters_of(folder)
    if found == dict(parameters):
        return folder
    made_from = "something not made by this program" if found is None else f"what was made from {found}"
    raise ConfigError(
        f"{folder} holds {made_from}; asked for is {dict(parameters)}: delete the folder or name another"
    )


def _parameters_of(folder: Path) -> object:
    try:
        return json.loads((folder / PARAMETERS_FILE).read_text())
    except (OSError, ValueError):
        return None


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        fsync_path(path)
    fsync_path(folder)
