"""A row of a data set: its cells as text, and its columns as JSON.

A row that does not hold what it should raises UnusableRow with the reason:
nothing is turned into Python's own text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from decimal import Decimal
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]
"""By the names of the columns."""
# `json.dumps` would make an encoder for each row
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
# beyond this many zeros a number is written with its exponent
_MOST_ZEROS = 20


class UnusableRow(Exception):
    """The row cannot be tried or trained; the message says why."""


class UnreadableRow(dict[str, Any]):
    """Stands for a row that could not be read: no columns, and the reason."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason


class Columns(Mapping[str, Any]):
    """A row's columns by name, read-only. Decoded when first read; travels to other processes as text.

    What a reader changes in a list or dict that it was given is its own copy.
    """

    __slots__ = ("_decoded", "text")

    def __init__(self, text: str = "{}") -> None:
        self.text = text
        self._decoded: dict[str, Any] | None = None

    def _all(self) -> dict[str, Any]:
        if self._decoded is None:
            self._decoded = json.loads(self.text)
        return self._decoded

    def __getitem__(self, name: str) -> Any:
        value = self._all()[name]
        return deepcopy(value) if isinstance(value, list | dict) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __eq__(self, other: object) -> bool:
        return self._all() == dict(other) if isinstance(other, Mapping) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.text)

    def __reduce__(self) -> tuple[type[Columns], tuple[str]]:
        return Columns, (self.text,)

    def __repr__(self) -> str:
        return f"Columns({self._all()!r})"


def columns_text(row: Mapping[str, Any]) -> str:
    """The row as JSON: NaN and infinity, which JSON has not, become null; times and decimals become text."""
    try:
        return _ENCODER.encode(row)
    except (TypeError, ValueError):  # it holds such a value
        return _ENCODER.encode(_plain(row))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return f"<{len(value)} bytes>" if isinstance(value, bytes) else str(value)


def as_written(value: object) -> str | None:
    """A cell as text, None where it holds nothing.

    Numbers in their shortest exact form without an exponent, `true` and `false` as in JSON,
    lists and objects as JSON.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        text = repr(value)
        is_short = 10**-_MOST_ZEROS < abs(value) < 10**_MOST_ZEROS
        return f"{Decimal(text):f}" if "e" in text and is_short else text
    if isinstance(value, Mapping):
        return columns_text(value)
    if isinstance(value, list | tuple):
        return columns_text({"": value})[len('{"": ') : -1]
    return str(value)


def kind_of(value: object) -> str:
    """What a value is, in the words of JSON."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "null"
    kinds = {str: "text", bool: "true or false", int: "a number", float: "a number"}
    fallback = (
        "an object" if isinstance(value, Mapping) else "a list" if isinstance(value, list | tuple) else ""
    )
    return kinds.get(type(value)) or fallback or type(value).__name__
