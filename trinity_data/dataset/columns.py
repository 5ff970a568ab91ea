"""The columns of a task set's row, as JSON text in the store and as a read-only mapping
for workflows and rewards.

What a reader changes in a list or dict that it was given is its own copy:
the next reader gets the row as it was.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any


class Columns(Mapping[str, Any]):
    """The row's columns by name. Decoded when first read; travels to other processes as text."""

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
    return json.dumps(_plain(row), ensure_ascii=False, allow_nan=False)


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
