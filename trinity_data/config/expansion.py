"""What the interpolations of a file come to, found without resolving them.

Two kinds are allowed, `${a.b}` and `${oc.env:NAME,default}`. How often one refers to others is bounded,
because ten lines that each name the one below twice are a thousand look-ups.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from trinity_data.config.base import KeyPath

MAX_LOOKUPS = 20_000
"""Over the whole file; the files of the documents need about ten."""
MAX_LENGTH = 10**7
"""Characters of all values together."""
MAX_CHAIN = 30
"""Keys that refer to each other in a row."""
ALLOWED = "allowed: ${a.b} and ${oc.env:NAME,default}"
_ENVIRONMENT = re.compile(r"\s*oc\.env\s*:")
_RESOLVER = re.compile(r"\s*[\w.]*\s*:")


class ExpansionError(Exception):
    """An interpolation that is not allowed, or too many of them; its message is the reason."""


class _Size(NamedTuple):
    """Of a value when everything in it is looked up."""

    lookups: int
    length: int
    chain: int


def check_expansion(data: Any) -> None:
    """Raises ExpansionError where the interpolations of a whole file are too many.

    See `check_text` for one of them.
    """
    size = _Sizes(data).of(())
    for count, most, plural in (
        (size.lookups, MAX_LOOKUPS, "look-ups"),
        (size.length, MAX_LENGTH, "characters"),
        (size.chain, MAX_CHAIN, "keys that refer to each other in a row"),
    ):
        if count > most:
            shown = f"{count:,}" if count < 10**9 else "more than 1,000,000,000"
            raise ExpansionError(f"its interpolations come to {shown} {plural}; allowed: {most:,}")


def check_text(text: str) -> None:
    """Raises ExpansionError for an interpolation of another kind than the two."""
    for inner in interpolations(text):
        if _ENVIRONMENT.match(inner):
            check_text(inner)
        elif _RESOLVER.match(inner):
            raise ExpansionError(f"found ${{{inner.strip()}}}; {ALLOWED}")
        elif "${" in inner:
            raise ExpansionError(
                f"found an interpolation in the name of a key, ${{{inner.strip()}}}; {ALLOWED}"
            )


def interpolations(text: str) -> Iterator[str]:
    """What stands between `${` and its `}`, outermost first; nothing after one that does not end."""
    at = 0
    while (start := text.find("${", at)) >= 0:
        backslashes = len(text[:start]) - len(text[:start].rstrip("\\"))
        end = _end(text, start + 2)
        if end is None:
            return
        if backslashes % 2:
            at = start + 2
            continue
        yield text[start + 2 : end]
        at = end + 1


def environment_names(text: str) -> Iterator[str]:
    """Environment variables that a text reads, those of defaults too."""
    for inner in interpolations(text):
        if match := _ENVIRONMENT.match(inner):
            yield inner[match.end() :].split(",", 1)[0].strip()
        yield from environment_names(inner)


def references(text: str, path: KeyPath) -> Iterator[KeyPath]:
    """Keys that a text at `path` names, from the top of the file."""
    for inner in interpolations(text):
        if _ENVIRONMENT.match(inner):
            yield from references(inner, path)
        elif not _RESOLVER.match(inner):
            # `a.b[0]` from the top; `.b` beside `path`, `..b` above it
            name = inner.strip().lstrip(".")
            dots = len(inner.strip()) - len(name)
            parts = [part for part in re.split(r"[.\[\]]+", name) if part]
            above = path[: max(len(path) - dots, 0)] if dots else ()
            yield (*above, *(int(part) if part.isdigit() else part for part in parts))


def _end(text: str, start: int) -> int | None:
    """Where the interpolation that began before `start` ends; braces inside come in pairs."""
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position
    return None


class _Sizes:
    """Sizes of all values of a file; each is worked out once, however often it is referred to."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self._known: dict[KeyPath, _Size] = {}
        self._open: set[KeyPath] = set()

    def of(self, path: KeyPath) -> _Size:
        if path in self._known or path in self._open:
            # what refers to itself is reported when it is resolved
            return self._known.get(path, _Size(1, 0, 0))
        if len(self._open) > 10 * MAX_CHAIN:
            raise ExpansionError(
                f"it is nested, or refers to other keys, more than {10 * MAX_CHAIN} times in a row"
            )
        self._open.add(path)
        self._known[path] = self._measure(path, self._value(path))
        self._open.remove(path)
        return self._known[path]

    def _measure(self, path: KeyPath, value: Any) -> _Size:
        if isinstance(value, dict | list):
            keys = value if isinstance(value, dict) else range(len(value))
            return _sum([self.of((*path, key)) for key in keys], chain=0)
        text = str(value)
        if not isinstance(value, str) or "${" not in value:
            return _Size(0, len(text), 0)
        names = list(environment_names(text))
        own = _Size(len(names), len(text) + sum(len(os.environ.get(name, "")) for name in names), 0)
        targets = [self.of(target) for target in references(text, path)]
        return _sum([own, *(target._replace(lookups=1 + target.lookups) for target in targets)], chain=1)

    def _value(self, path: KeyPath) -> Any:
        """What stands at `path`; through keys that stand for a section of the file."""
        for _ in range(MAX_CHAIN):
            value: Any = self._data
            for depth, part in enumerate(path):
                if isinstance(value, dict):
                    value = value.get(part)
                elif isinstance(value, list) and isinstance(part, int) and part < len(value):
                    value = value[part]
                elif isinstance(value, str) and (targets := list(references(value, path[:depth]))):
                    path = (*targets[0], *path[depth:])
                    break
                else:
                    return None
            else:
                return value
        raise ExpansionError(f"it refers to other keys more than {MAX_CHAIN} times in a row")


def _sum(sizes: list[_Size], *, chain: int) -> _Size:
    longest = max((size.chain for size in sizes), default=0)
    return _Size(sum(size.lookups for size in sizes), sum(size.length for size in sizes), longest + chain)
