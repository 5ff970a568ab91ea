"""What is wrong with a pipeline file, and where: one `Diagnostic` each, all of them in one ConfigError.

Each is one line: `<file>:<line>: <key path>: <what was found>; <what is allowed>; <what to do>`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from trinity_data.config.base import KeyPath
from trinity_data.config.secrets import masked
from trinity_data.config.yaml_file import YamlFile
from trinity_data.errors import ConfigError


class Diagnostic(NamedTuple):
    """One problem at one key."""

    path: KeyPath
    """From the top of the file, or of a stage."""
    message: str
    line: str = ""
    """A line number, `override` for a value of the command line, or nothing."""

    def text(self, file: Path) -> str:
        """As a person reads it, on one line; messages of other people's code may have many."""
        message = " ".join(line.strip() for line in self.message.splitlines() if line.strip())
        parts = (f"{file}:{self.line}" if self.line else str(file), ".".join(map(str, self.path)), message)
        return ": ".join(part for part in parts if part)


class Diagnostics:
    """All diagnostics of one file, each once, however many stages inherit its key."""

    def __init__(self, file: YamlFile) -> None:
        self._file = file
        self._stages: dict[Diagnostic, set[int]] = {}
        """By diagnostic, the stages that inherit the key from the top of the file."""
        self._silenced: set[KeyPath] = set()

    def __bool__(self) -> bool:
        return bool(self._stages)

    def add(self, path: KeyPath, message: str, *, stage: int | None = None) -> None:
        """`path` counts from the top of the file, or from the top of the stage."""
        written = self._file.written(path, stage=stage)
        label = self._file.label(written)
        located = Diagnostic((label,), masked(message, self._file.secrets), self._file.place(written))
        if located not in self._stages and any(
            written[: len(silenced)] == silenced or silenced[: len(written)] == written
            for silenced in self._silenced
        ):
            return
        stages = self._stages.setdefault(located, set())
        if stage is not None and written[:1] != ("stages",):
            stages.add(stage)

    def extend(self, diagnostics: Iterable[Diagnostic], *, stage: int | None = None) -> None:
        """Adds several, whose lines are not known yet."""
        for path, message, _ in diagnostics:
            self.add(path, message, stage=stage)

    def silence(self, path: KeyPath, *, stage: int | None) -> None:
        """Nothing more is added for a key whose value is a stand-in for one that could not be read."""
        self._silenced.add(self._file.written(path, stage=stage))

    def raise_if_any(self) -> None:
        """Raises `error()` where there is something to say."""
        if self:
            raise self.error()

    def error(self) -> ConfigError:
        """All of them; one at the top of the file that concerns only some stages names them."""
        stages_of_file = self._file.data.get("stages")
        num_stages = len(stages_of_file) if isinstance(stages_of_file, list) else 0
        diagnostics = []
        for diagnostic, stages in self._stages.items():
            names = ", ".join(self._file.stage_label(stage) for stage in sorted(stages))
            in_stages = f" (in stage {names})" if 0 < len(stages) < num_stages else ""
            diagnostics.append(diagnostic._replace(message=f"{diagnostic.message}{in_stages}"))
        return config_error(self._file.file, diagnostics)

    def lines(self) -> list[str]:
        """One line each, in the file's order."""
        return str(self.error()).splitlines()


def config_error(file: Path, diagnostics: Iterable[Diagnostic]) -> ConfigError:
    """All diagnostics of a file in one error, each once, in the file's order."""

    def place(diagnostic: Diagnostic) -> tuple[int, str, str]:
        line = int(diagnostic.line) if diagnostic.line.isdigit() else 0
        return line, ".".join(map(str, diagnostic.path)), diagnostic.message

    return ConfigError("\n".join(each.text(file) for each in sorted(set(diagnostics), key=place)))


def show(value: object, *, limit: int = 60) -> str:
    """A value as the file would spell it, shortened."""
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
