"""`key.path=value` from the command line, written into the data of a pipeline file
before anything is resolved.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from trinity_data.config.base import KeyPath
from trinity_data.config.diagnostics import Diagnostic, config_error
from trinity_data.config.secrets import MASK, is_secret_key
from trinity_data.config.yaml_file import OVERRIDE, YamlFile
from trinity_data.config.yaml_reader import parse_value
from trinity_data.errors import ConfigError, unknown_name


def apply_overrides(source: YamlFile, overrides: Sequence[str]) -> None:
    """Writes each value in place; a later one takes precedence over an earlier one."""
    diagnostics = [each for override in overrides for each in _apply(source, override)]
    if diagnostics:
        raise config_error(source.file, diagnostics)


def _apply(source: YamlFile, override: str) -> Iterator[Diagnostic]:
    key, equals, text = override.partition("=")
    parts = [part for part in re.split(r"[.\[\]]+", key.strip()) if part]
    if not equals or not parts:
        message = "found no `key.path=value`; for example buffer.total_steps=5"
        yield Diagnostic((repr(override),), message, OVERRIDE)
        return
    try:
        value = parse_value(source.file, text)
    except ConfigError:
        shown = MASK if is_secret_key(key.rpartition(".")[2]) else repr(text)
        message = f"found {shown}, which is not valid YAML; put text in quotes"
        yield Diagnostic((key,), message, OVERRIDE)
        return
    try:
        path = _write(source.data, parts, value)
    except KeyError as error:
        yield Diagnostic((key,), str(error.args[0]), OVERRIDE)
        return
    for size in range(1, len(path) + 1):
        source.places.setdefault(path[:size], OVERRIDE)
    _note(source, path, value)


def _write(data: dict[str, Any], parts: list[str], value: Any) -> KeyPath:
    """Sets the value; sections that are not there are made, items of a list must be there."""
    here: Any = data
    path: list[str | int] = []
    for position, part in enumerate(parts):
        last = position == len(parts) - 1
        if isinstance(here, list):
            step: str | int = _item(here, part)
        elif isinstance(here, dict):
            step = part
            if not last and here.get(part) is None:
                here[part] = {}
        else:
            raise KeyError(
                f"{'.'.join(parts[:position])} is a value, not a section; there is no {part!r} in it"
            )
        path.append(step)
        if last:
            here[step] = value
        else:
            here = here[step]
    return tuple(path)


def _item(items: list[Any], part: str) -> int:
    """An item by its number, or by its `stage_name` or `name`."""
    names = [
        str(item.get("stage_name", item.get("name", index))) if isinstance(item, dict) else str(index)
        for index, item in enumerate(items)
    ]
    if part in names:
        return names.index(part)
    if part.isdigit() and int(part) < len(items):
        return int(part)
    raise KeyError(f"{unknown_name('item', part, names)}; an item is called by its name or its number from 0")


def _note(source: YamlFile, path: KeyPath, value: Any) -> None:
    for known in [known for known in source.places if known[: len(path)] == path]:
        del source.places[known]
    source.places[path] = OVERRIDE
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, child in children:
        _note(source, (*path, key), child)
