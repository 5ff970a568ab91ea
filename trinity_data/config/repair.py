"""A stage with unreadable values, read once more without them,
so that everything else in it is checked as well.

A wrong `mode` or `algorithm_type` could have been meant as any allowed one:
only what would be wrong with each of them is reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any, NamedTuple, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from trinity_data.config.algorithm_registry import ALGORITHMS
from trinity_data.config.base import KeyPath
from trinity_data.config.defaults import fill_defaults
from trinity_data.config.diagnostics import Diagnostic
from trinity_data.config.run import Mode, StageConfig
from trinity_data.config.validators import contradictions

STAND_IN = "synthetic://qwen2-1m"
"""For text that is missing; nothing is said about it."""
MODE: KeyPath = ("mode",)
ALGORITHM: KeyPath = ("algorithm", "algorithm_type")
# each round may uncover what the one before hid
ROUNDS = 6


class Repaired(NamedTuple):
    """What could be read of a stage."""

    stage: StageConfig | None
    paths: frozenset[KeyPath]
    """Keys whose values were left out, or replaced by a stand-in."""
    diagnostics: list[Diagnostic]
    """What is wrong with the rest, whatever the values left out should have been."""


def repair(data: dict[str, Any]) -> Repaired:
    """`data` cannot be read as a stage; nothing of it is changed."""
    readable = deepcopy(data)
    paths: set[KeyPath] = set()
    for _ in range(ROUNDS):
        details = _errors(readable)
        if not details:
            return Repaired(_stage(readable), frozenset(paths), list(_common_diagnostics(readable, paths)))
        for detail in details:
            paths.add(_leave_out(readable, detail))
    return Repaired(None, frozenset(paths), [])


def _errors(data: dict[str, Any]) -> list[ErrorDetails]:
    try:
        StageConfig.model_validate(data)
    except ValidationError as error:
        return error.errors(include_url=False)
    return []


def _stage(data: dict[str, Any]) -> StageConfig:
    return StageConfig.model_validate(data)


def _leave_out(data: dict[str, Any], detail: ErrorDetails) -> KeyPath:
    """Removes the value that pydantic refuses; of a list the whole list. Returns its path."""
    path: KeyPath = tuple(detail["loc"])
    while path and isinstance(path[-1], int):
        path = path[:-1]
    here: Any = data
    for part in path[:-1]:
        if isinstance(here, dict) and not isinstance(here.get(part), dict | list):
            here[part] = {}
        here = here[part]
    if detail["type"] == "missing" and len(path) == len(detail["loc"]):
        here[path[-1]] = {} if path[-1] in StageConfig.model_fields else STAND_IN
        if path == ALGORITHM:
            here[path[-1]] = next(iter(ALGORITHMS))
    elif path == ALGORITHM:
        here[path[-1]] = next(iter(ALGORITHMS))
    else:
        here.pop(path[-1], None)
    return path


def _common_diagnostics(data: dict[str, Any], paths: set[KeyPath]) -> Iterator[Diagnostic]:
    """What the rules find with every mode and algorithm that may have been meant."""
    common: list[Diagnostic] | None = None
    for meant in _meant(data, paths):
        given = _stage(meant)
        found = list(contradictions(given, fill_defaults(given, seed=0)))
        common = found if common is None else [diagnostic for diagnostic in common if diagnostic in found]
    for diagnostic in common or ():
        path = diagnostic.path
        if not any(path[: len(left)] == left or left[: len(path)] == path for left in paths):
            yield diagnostic


def _meant(data: dict[str, Any], paths: set[KeyPath]) -> Iterator[dict[str, Any]]:
    modes = get_args(Mode) if MODE in paths else (data.get("mode"),)
    algorithms = list(ALGORITHMS) if ALGORITHM in paths else [None]
    for mode in modes:
        for name in algorithms:
            algorithm = data["algorithm"] if name is None else {**data["algorithm"], "algorithm_type": name}
            yield {**data, "mode": mode, "algorithm": algorithm}
