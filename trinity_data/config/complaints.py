"""Collects what is wrong with a run and says it at the line that says it: the stage's own,
or the one it inherits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trinity_data.config.diagnostics import KeyPath, Problem, config_error
from trinity_data.config.secrets import masked
from trinity_data.config.yaml_file import YamlFile
from trinity_data.errors import ConfigError


class Complaints:
    """One line a problem, however many stages inherit it."""

    def __init__(self, source: YamlFile) -> None:
        self._source = source
        self._stages: dict[Problem, set[int]] = {}
        """For each problem the stages that have it; none where it is the whole file's."""
        self._silent: set[KeyPath] = set()

    def __bool__(self) -> bool:
        return bool(self._stages)

    def add(self, path: KeyPath, text: str, *, stage: int | None = None) -> None:
        """`path` counts from the top of the file, or from the top of the stage."""
        place = self._source.written(path, stage=stage)
        text = masked(text, self._source.secrets)
        problem = Problem(self._source.place(place), self._source.label(place), text)
        if problem not in self._stages and self._is_silent(place):
            return
        stages = self._stages.setdefault(problem, set())
        if stage is not None and place[:1] != ("stages",):
            stages.add(stage)

    def _is_silent(self, place: KeyPath) -> bool:
        return any(place[: len(silent)] == silent or silent[: len(place)] == place for silent in self._silent)

    def silence(self, path: KeyPath, *, stage: int | None) -> None:
        """Nothing more is said about a key whose value is a stand-in for one that could not be read."""
        self._silent.add(self._source.written(path, stage=stage))

    def error(self) -> ConfigError:
        """All of them."""
        return config_error(self._source.file, self._problems())

    def lines(self) -> list[str]:
        """All of them, one line each, in the file's order."""
        return str(self.error()).splitlines()

    def _problems(self) -> Iterator[Problem]:
        """What stands at the top of the file and is wrong for some stages only, names them."""
        stages_given = self._source.data.get("stages")
        num_stages = len(stages_given) if isinstance(stages_given, list) else 0
        for problem, stages in self._stages.items():
            if 0 < len(stages) < num_stages:
                names = ", ".join(self._source.stage_label(stage) for stage in sorted(stages))
                yield replace(problem, text=f"{problem.text} (in stage {names})")
            else:
                yield problem
