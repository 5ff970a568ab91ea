"""`key.path=value` from the command line, written into the data of a pipeline file
before anything is resolved.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from trinity_data.config.base import KeyPath
from trinity_data.config.diagnostics import Diagnostic, config_error
from trinity_data.config.secrets import MASK, is_secret_key
from trinity_data.config.yaml_file import OVERRIDE, YamlFile
from trinity_data.config.yaml_reader import parse_value
from trinity_data.errors import ConfigError, unknown_name


def apply_overrides(source: YamlFile, overrides: Sequence[str]) -> None:
    """Writes each value in place; a later one takes precedence over an earlier one."""
    diagnostics = list[Diagnostic]()
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = [part for part in re.split(r"[.\[\]]+", key.strip()) if part]
        if not equals or not parts:
            message = "found no `key.path=value`; for example buffer.total_steps=5"
            diagnostics.append(Diagnostic((repr(override),), message, OVERRIDE))
            continue
        try:
            value = parse_value(source.file, text)
            _note(source, _write(source, parts, value), value)
        except ConfigError:
            shown = MASK if is_secret_key(key.rpartition(".")[2]) else repr(text)
            message = f"found {shown}, which is not valid YAML; put text in quotes"
            diagnostics.append(Diagnostic((key,), message, OVERRIDE))
        except KeyError as error:
            diagnostics.append(Diagnostic((key,), str(error.args[0]), OVERRIDE))
    if diagnostics:
        raise config_error(source.file, diagnostics)


def _write(source: YamlFile, parts: list[str], value: Any) -> KeyPath:
    """Sets the value; sections that are not there are made, items of a list must be there."""
    section: Any = source.data
    path: list[str | int] = []
    for position, part in enumerate(parts):
        is_last = position == len(parts) - 1
        if isinstance(section, list):
            key: str | int = _item(section, part)
        elif isinstance(section, dict):
            key = part
            if not is_last and section.get(part) is None:
                section[part] = {}
        else:
            raise KeyError(
                f"{'.'.join(parts[:position])} is a value, not a section; there is no {part!r} in it"
            )
        path.append(key)
        source.places.setdefault(tuple(path), OVERRIDE)
        if is_last:
            section[key] = value
        else:
            section = section[key]
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
    for below in [each for each in source.places if each[: len(path)] == path]:
        del source.places[below]
    source.places[path] = OVERRIDE
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, child in children:
        _note(source, (*path, key), child)
