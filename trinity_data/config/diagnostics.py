"""What is wrong with a pipeline file, and where.

Every problem is one line: `<file>:<line>: <key path>: <what was found>; <what is allowed>; <what to do>`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from trinity_data.errors import ConfigError

KeyPath = tuple[str | int, ...]


class Finding(NamedTuple):
    """What is wrong at a key of a stage."""

    path: KeyPath
    text: str


@dataclass(frozen=True)
class Problem:
    """One line of a ConfigError."""

    where: str
    """A line number, `override` for a value of the command line, or nothing."""
    path: str
    text: str

    def line(self, file: Path) -> str:
        """As a person reads it."""
        parts = (f"{file}:{self.where}" if self.where else str(file), self.path, _on_one_line(self.text))
        return ": ".join(part for part in parts if part)


def _on_one_line(text: str) -> str:
    """What other people's code says may have many lines."""
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


def config_error(file: Path, problems: Iterable[Problem]) -> ConfigError:
    """All problems of a file in one error, each once, in the file's order."""
    unique = sorted(set(problems), key=lambda problem: (_line_number(problem), problem.path, problem.text))
    return ConfigError("\n".join(problem.line(file) for problem in unique))


def _line_number(problem: Problem) -> int:
    return int(problem.where) if problem.where.isdigit() else 0


def show(value: object, *, limit: int = 60) -> str:
    """A value as the file would spell it, cut short."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list | tuple):
        return "a list"
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"
