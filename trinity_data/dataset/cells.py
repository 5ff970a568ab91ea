"""The cell that a key of `format` names: the column of that name, a path such as `a.b[0].c` into a column,
or a text with columns or paths in braces.

Text in which a path goes on is read as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from trinity_data.dataset.row import UnusableRow, as_written, kind_of
from trinity_data.errors import ConfigError

_FIELD = re.compile(r"\{\{|\}\}|\{([^{}]+)\}|[{}]")
_PATH = re.compile(r"(?P<column>[^.\[\]{}]+)(?P<steps>(\.[^.\[\]{}]+|\[-?\d+\])+)")
_STEP = re.compile(r"\.(?P<name>[^.\[\]]+)|\[(?P<number>-?\d+)\]")


def is_template(key: str, columns: Collection[str] | Mapping[str, Any]) -> bool:
    """Whether the key holds columns in braces; a column of just that name goes first."""
    return "{" in key and key not in columns


def columns_of(key: str, columns: Collection[str]) -> list[str]:
    """The columns that are read for a key."""
    if not is_template(key, columns):
        return [_column(key, columns)]
    names = (field.group(1) for field in _FIELD.finditer(key))
    return list(dict.fromkeys(_column(name, columns) for name in names if name is not None))


def check_key(key: str, columns: Collection[str]) -> None:
    """Raises ConfigError for a template that names no column, or has a brace without a partner."""
    if not is_template(key, columns):
        return
    if any(field.group(0) in ("{", "}") for field in _FIELD.finditer(key)) or not columns_of(key, columns):
        raise ConfigError(
            f"found {key!r}, a text of several columns with a brace that has no partner or without a column; "
            f"write a column as {{name}}, and a brace of the text as {{{{ or }}}}"
        )


def cell(key: str, row: Mapping[str, Any]) -> Any:
    """What the row holds under the key; None where it holds nothing.

    Raises UnusableRow for a template one of whose columns holds no text or number.
    """
    if not is_template(key, row):
        return _value(key, row)

    def text_of(field: re.Match[str]) -> str:
        name = field.group(1)
        if name is None:
            return field.group(0)[0]
        value = _value(name, row)
        text = None if isinstance(value, Mapping | list | tuple) else as_written(value)
        if text is None:
            raise UnusableRow(f"column {name!r} of {key!r} holds {kind_of(value)}")
        return text

    return _FIELD.sub(text_of, key)


def _column(name: str, columns: Collection[str]) -> str:
    path = None if name in columns else _PATH.fullmatch(name)
    return name if path is None else path["column"]


def _value(name: str, row: Mapping[str, Any]) -> Any:
    path = None if name in row else _PATH.fullmatch(name)
    if path is None:
        return row.get(name)
    value = row.get(path["column"])
    for step in _STEP.finditer(path["steps"]):
        value = _inner(value, step["name"], int(step["number"] or 0))
    return value


def _inner(value: Any, name: str | None, number: int) -> Any:
    """A field of an object, or an item of a list."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    if name is not None:
        return value.get(name) if isinstance(value, Mapping) else None
    has_item = isinstance(value, list | tuple) and -len(value) <= number < len(value)
    return value[number] if has_item else None
