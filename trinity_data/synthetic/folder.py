"""Folders that are made once and then only read.

A folder is there whole or not at all: it is filled under another name, then renamed. It carries the
parameters it was made from in a hidden file, so that the same request finds it again and another request is
refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from trinity_data.atomic import new_folder
from trinity_data.errors import ConfigError

PARAMETERS_FILE = ".synthetic.json"
"""Hidden, so that `datasets` does not take it for rows."""

Parameters = Mapping[str, str | int]


def make_once(folder: Path, parameters: Parameters, fill: Callable[[Path], None]) -> Path:
    """`folder` as `fill` left it; filled by the first process that comes."""
    if folder.exists():
        return _reuse(folder, parameters)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with new_folder(folder) as draft:
            fill(draft)
            (draft / PARAMETERS_FILE).write_text(json.dumps(dict(parameters), sort_keys=True) + "\n")
    except OSError:
        if not folder.exists():
            raise
        return _reuse(folder, parameters)  # another process was faster
    return folder


def _reuse(folder: Path, parameters: Parameters) -> Path:
    content = "something not made by this program"
    try:
        recorded = json.loads((folder / PARAMETERS_FILE).read_text())
        if recorded == dict(parameters):
            return folder
        content = f"what was made from {recorded}"
    except (OSError, ValueError):
        pass
    raise ConfigError(
        f"{folder} holds {content}; asked for is {dict(parameters)}: delete the folder or name another"
    )
