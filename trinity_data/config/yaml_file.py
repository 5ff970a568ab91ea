"""A pipeline file as plain data that knows the line of every key."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trinity_data.config.base import KeyPath
from trinity_data.config.expansion import environment_names

OVERRIDE = "override"
"""The place of a value of the command line."""


@dataclass
class YamlFile:
    """Plain data and where each part of it was written."""

    file: Path
    data: dict[str, Any]
    places: dict[KeyPath, str] = field(default_factory=dict)
    interpolated: dict[KeyPath, str] = field(default_factory=dict)
    """What stood where a value was interpolated."""
    secrets: frozenset[str] = frozenset()
    """Values that are kept out of files and messages."""

    def place(self, path: KeyPath) -> str:
        """Where `path`, or the nearest key above it, was written."""
        return self.places.get(path[: self.depth(path)], "")

    def written(self, path: KeyPath, *, stage: int | None) -> KeyPath:
        """The path in the file of a key of a stage: the stage's own, or the one it inherits from the top."""
        if stage is None:
            return self._spelling(path)
        own, top = self._spelling(("stages", stage, *path)), self._spelling(path)
        # `stages` and the number are always written; a key written in both places is the stage's own
        below_the_stage = self.depth(own) - 2
        return own if below_the_stage > 0 and below_the_stage >= self.depth(top) else top

    def _spelling(self, path: KeyPath) -> KeyPath:
        """`taskset` may be the only item of `tasksets`, and `operators` the recipe `config_path`."""
        if "operators" in path and path not in self.places:
            recipe = (*path[: path.index("operators")], "config_path")
            if recipe in self.places:
                return recipe
        if path in self.places or "taskset" not in path:
            return path
        at = path.index("taskset")
        other = (*path[:at], "tasksets", 0)
        return (*other, *path[at + 1 :]) if other in self.places else path

    def depth(self, path: KeyPath) -> int:
        """How much of `path` was written."""
        return next((size for size in range(len(path), 0, -1) if path[:size] in self.places), 0)

    def label(self, path: KeyPath) -> str:
        """A key path as an override would spell it; stages by their names."""
        parts = [str(part) for part in path]
        if len(path) > 1 and path[0] == "stages" and isinstance(path[1], int):
            parts[1] = self.stage_label(path[1])
        return ".".join(parts)

    def stage_label(self, index: int) -> str:
        """A stage's name where it has a usable one, else its number."""
        stages = self.data.get("stages")
        stage = stages[index] if isinstance(stages, list) and index < len(stages) else None
        name = stage.get("stage_name") if isinstance(stage, dict) else None
        return name if isinstance(name, str) and name and "${" not in name else str(index)

    def environment_variable(self, path: KeyPath) -> str | None:
        """The variable that the value at `path` was read from, if any.

        Through keys that only point at others.
        """
        written = self.interpolated.get(path, "")
        if name := next(environment_names(written), None):
            return name
        pointer = re.fullmatch(r"\$\{([\w.]+)\}", written)
        if pointer is None:
            return None
        return self.environment_variable(
            tuple(int(x) if x.isdigit() else x for x in pointer.group(1).split("."))
        )
