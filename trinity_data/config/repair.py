"""A stage with unreadable values, read once more without them,
so that everything else in it is checked as well.

A wrong `mode` or `algorithm_type` could have been meant as any allowed one:
only what would be wrong with each of them is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import product
from typing import Any, NamedTuple, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from trinity_data.config.algorithm_registry import ALGORITHMS
from trinity_data.config.base import KeyPath
from trinity_data.config.contradictions import contradictions
from trinity_data.config.defaults import fill_defaults
from trinity_data.config.diagnostics import Diagnostic
from trinity_data.config.run import Mode, StageConfig

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


def repair(data: dict[str, Any], gpu_count: Callable[[], int]) -> Repaired:
    """`data` cannot be read as a stage; nothing of it is changed. `gpu_count` as of `fill_defaults`."""
    readable = deepcopy(data)
    paths: set[KeyPath] = set()
    for _ in range(ROUNDS):
        try:
            stage = StageConfig.model_validate(readable)
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                paths.add(_leave_out(readable, detail))
        else:
            found = list(_common_diagnostics(readable, paths, gpu_count))
            return Repaired(stage, frozenset(paths), found)
    return Repaired(None, frozenset(paths), [])


def _leave_out(data: dict[str, Any], detail: ErrorDetails) -> KeyPath:
    """Removes the value that pydantic refuses; of a list the whole list. Returns its path."""
    path: KeyPath = tuple(detail["loc"])
    while path and isinstance(path[-1], int):
        path = path[:-1]
    section: Any = data
    for part in path[:-1]:
        if isinstance(section, dict) and not isinstance(section.get(part), dict | list):
            section[part] = {}
        section = section[part]
    if path == ALGORITHM:
        section[path[-1]] = next(iter(ALGORITHMS))
    elif detail["type"] == "missing" and len(path) == len(detail["loc"]):
        section[path[-1]] = {} if path[-1] in StageConfig.model_fields else STAND_IN
    else:
        section.pop(path[-1], None)
    return path


def _common_diagnostics(
    data: dict[str, Any], paths: set[KeyPath], gpu_count: Callable[[], int]
) -> Iterator[Diagnostic]:
    """What the rules find with every mode and algorithm that may have been meant."""
    modes = get_args(Mode) if MODE in paths else (data.get("mode"),)
    algorithms = list(ALGORITHMS) if ALGORITHM in paths else [data["algorithm"].get("algorithm_type")]
    common: list[Diagnostic] | None = None
    for mode, name in product(modes, algorithms):
        algorithm = {**data["algorithm"], "algorithm_type": name}
        stage = StageConfig.model_validate({**data, "mode": mode, "algorithm": algorithm})
        diagnostics = list(contradictions(stage, fill_defaults(stage, seed=0, gpu_count=gpu_count)))
        common = diagnostics if common is None else [each for each in common if each in diagnostics]
    for diagnostic in common or ():
        path = diagnostic.path
        if not any(path[: len(unread)] == unread or unread[: len(path)] == path for unread in paths):
            yield diagnostic
