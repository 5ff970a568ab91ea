"""A pipeline file as plain data that knows the line of every key.

Stricter than YAML 1.1: a key given twice is an error, `1e-5` is a number, and a date is text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trinity_data.config.diagnostics import KeyPath, Problem, config_error
from trinity_data.config.expansion import environment_names
from trinity_data.errors import ConfigError

OVERRIDE = "override"
MAX_CHARACTERS = 10**6
MAX_VALUES = 20_000
MAX_DEPTH = 60


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
        """`taskset` may be written as the only item of `tasksets`."""
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
        if found := next(environment_names(written), None):
            return found
        pointer = re.fullmatch(r"\$\{([\w.]+)\}", written)
        if pointer is None:
            return None
        return self.environment_variable(
            tuple(int(x) if x.isdigit() else x for x in pointer.group(1).split("."))
        )


class _Loader(yaml.SafeLoader):
    """SafeLoader with its own notion of numbers."""


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern) for tag, pattern in pairs if tag.rsplit(":", 1)[1] not in ("timestamp", "float", "int")
    ]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_FLOAT = (
    r"[-+]?(?:[0-9]+\.[0-9]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?"
    r"|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))"
)
_NOT_A_NUMBER = r"\.(?:nan|NaN|NAN)"
_INT = r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+"
# pyyaml matches from the start only, hence the \Z
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(rf"(?:{_FLOAT}|{_NOT_A_NUMBER})\Z"), list("-+.0123456789")
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(rf"(?:{_INT})\Z"), list("-+0123456789"))


def read_pipeline_file(file: Path) -> YamlFile:
    """The file as it stands: no override, no interpolation, no defaults."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise config_error(
            file, [Problem("", "", "no such file; give the path of a pipeline file (YAML)")]
        ) from None
    except IsADirectoryError:
        raise config_error(
            file, [Problem("", "", "this is a folder; give the path of a pipeline file (YAML)")]
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise config_error(file, [Problem("", "", f"cannot be read as text: {error}")]) from None
    if len(text) > MAX_CHARACTERS:
        found = (
            f"found {len(text):,} characters; allowed: {MAX_CHARACTERS:,}; give a pipeline file, not its data"
        )
        raise config_error(file, [Problem("", "", found)])
    node = _compose(file, text)
    if not isinstance(node, yaml.MappingNode):
        found = "the file is empty" if node is None else "found no keys at the top of the file"
        text = f"{found}; a pipeline file is a mapping: `model:`, `buffer:`, …"
        raise config_error(file, [Problem("1", "", text)])
    places: dict[KeyPath, str] = {(): "1"}
    problems = list(_walked(file, node, places))
    if problems:
        raise config_error(file, problems)
    return YamlFile(file, _construct(file, text, node), places)


def parse_value(file: Path, text: str) -> Any:
    """A value of the command line, read like one of the file."""
    node = _compose(file, text)
    if node is None:
        return None
    problems = list(_walked(file, node, {}))
    if problems:
        raise config_error(file, problems)
    return _construct(file, text, node)


def _compose(file: Path, text: str) -> yaml.Node | None:
    try:
        return _Loader(text).get_single_node()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _syntax_error(file, error) from None


def _construct(file: Path, text: str, node: yaml.Node) -> Any:
    try:
        return _copied(_Loader(text).construct_document(node))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _syntax_error(file, error) from None


def _copied(data: Any) -> Any:
    """Without sharing: YAML's aliases are one object in several places, and an override means one place."""
    if isinstance(data, dict):
        return {key: _copied(value) for key, value in data.items()}
    return [_copied(value) for value in data] if isinstance(data, list) else data


def _syntax_error(file: Path, error: Exception) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).splitlines()[0]
    column = f", column {mark.column + 1}" if mark else ""
    text = (
        f"not valid YAML: {what}{column}; indent with spaces and put text that holds ': ', "
        f"'{{' or '%' in quotes"
    )
    return config_error(file, [Problem(str(mark.line + 1) if mark else "", "", text)])


class _TooLargeError(Exception):
    """Aliases make more of a file than it holds; its message says so."""


def _walked(file: Path, node: yaml.Node, places: dict[KeyPath, str]) -> list[Problem]:
    try:
        return list(_Walk().under(node, (), places, frozenset()))
    except _TooLargeError as error:
        raise config_error(file, [Problem("", "", str(error))]) from None


class _Walk:
    """Goes through a file as it is with its aliases written out, and stops where that is too much."""

    def __init__(self) -> None:
        self._visited = 0

    def under(
        self, node: yaml.Node, path: KeyPath, places: dict[KeyPath, str], above: frozenset[int]
    ) -> Iterator[Problem]:
        """Notes the line of every key under `node`; yields what YAML lets pass and we do not."""
        line = str(node.start_mark.line + 1)
        self._visited += 1
        if self._visited > MAX_VALUES or len(path) > MAX_DEPTH:
            found = (
                f"comes to more than {MAX_VALUES:,} values"
                if len(path) <= MAX_DEPTH
                else f"is nested more than {MAX_DEPTH} deep"
            )
            raise _TooLargeError(
                f"the file {found}, its anchors and aliases written out; write fewer of them"
            )
        if id(node) in above:
            yield Problem(line, ".".join(map(str, path)), "an anchor contains itself; write the values out")
            return
        above = above | {id(node)}
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                places[(*path, index)] = str(item.start_mark.line + 1)
                yield from self.under(item, (*path, index), places, above)
        elif isinstance(node, yaml.MappingNode):
            seen: dict[str, str] = {}
            for key, value in node.value:
                place = str(key.start_mark.line + 1)
                if key.tag == "tag:yaml.org,2002:merge":
                    yield from self._merged(value, path, places, above)
                    continue
                label = ".".join(map(str, (*path, key.value)))
                if key.tag != "tag:yaml.org,2002:str":
                    yield Problem(place, label, "a key must be text; put it in quotes")
                    continue
                if key.value in seen:
                    yield Problem(
                        place, label, f"given twice, first on line {seen[key.value]}; keep one of them"
                    )
                seen[key.value] = place
                places[(*path, key.value)] = place
                yield from self.under(value, (*path, key.value), places, above)

    def _merged(
        self, node: yaml.Node, path: KeyPath, places: dict[KeyPath, str], above: frozenset[int]
    ) -> Iterator[Problem]:
        """Keys that come in by `<<:`; a key written beside it goes before them, so it keeps its own line."""
        merged: dict[KeyPath, str] = {}
        for source in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            yield from self.under(source, path, merged, above)
        for key, place in merged.items():
            places.setdefault(key, place)
