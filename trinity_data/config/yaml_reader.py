"""The YAML of a pipeline file, or of a value of the command line, read by ruamel.yaml.

YAML 1.2, so that `1e-5` is a number; beyond it, `yes` and `no` are booleans, dates and numbers that begin
with 0 are text, a key that is written twice is an error, and what aliases come to is bounded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.resolver import VersionedResolver

from trinity_data.config.base import KeyPath
from trinity_data.config.diagnostics import Diagnostic, config_error
from trinity_data.config.yaml_file import YamlFile

DICT = "<dict>"
"""What messages name in place of the file, for a pipeline that was given as a dict."""
MAX_CHARACTERS = 10**6
MAX_VALUES = 20_000
MAX_DEPTH = 60
_TAG = "tag:yaml.org,2002:"
_MERGE, _STR, _PLAIN_TAGS = f"{_TAG}merge", f"{_TAG}str", (f"{_TAG}map", f"{_TAG}seq")


class _Resolver(VersionedResolver):
    """Which plain scalars are numbers, booleans and nulls, whatever version a file names."""

    @property
    def versioned_resolver(self) -> dict[str, list[tuple[str, re.Pattern[str]]]]:
        return _scalar_types()


@cache
def _scalar_types() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """By the first character of a scalar, the tags that it may have with their patterns."""
    yaml = VersionedResolver(version=(1, 2), loader=YAML(typ="safe", pure=True))
    not_ours = (f"{_TAG}timestamp", f"{_TAG}int", f"{_TAG}value")
    types = {
        first: [(tag, pattern) for tag, pattern in pairs if tag not in not_ours]
        for first, pairs in yaml.versioned_resolver.items()
    }
    for tag, pattern, firsts in (
        ("int", r"[-+]?(?:0|[1-9][0-9_]*)$|0x[0-9a-fA-F]+$", "-+0123456789"),
        ("bool", r"(?:yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF)$", "yYnNoO"),
    ):
        for first in firsts:
            types.setdefault(first, []).append((f"{_TAG}{tag}", re.compile(pattern)))
    return types


def read_pipeline_file(file: Path) -> YamlFile:
    """The file as written: no override, no interpolation, no defaults."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise config_error(
            file, [Diagnostic((), "no such file; give the path of a pipeline file (YAML)")]
        ) from None
    except IsADirectoryError:
        raise config_error(
            file, [Diagnostic((), "this is a folder; give the path of a pipeline file (YAML)")]
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise config_error(file, [Diagnostic((), f"cannot be read as text: {error}")]) from None
    if len(text) > MAX_CHARACTERS:
        size = f"found {len(text):,} characters; allowed: {MAX_CHARACTERS:,}"
        raise config_error(file, [Diagnostic((), f"{size}; give a pipeline file, not its data")])
    data, places = _parse(file, text)
    if not isinstance(data, dict):
        content = "the file is empty" if data is None else "found no keys at the top of the file"
        text = f"{content}; a pipeline file is a mapping: `model:`, `buffer:`, …"
        raise config_error(file, [Diagnostic((), text, "1")])
    return YamlFile(file, data, {(): "1"} | places)


def dict_as_file(pipeline: Mapping[str, Any]) -> YamlFile:
    """A pipeline that was given as a dict and has no lines. Raises a ConfigError as for a file."""
    file = Path(DICT)
    try:
        text = json.dumps(dict(pipeline), ensure_ascii=False)
    except (TypeError, ValueError) as error:
        message = f"cannot be written as YAML: {error}; give text, numbers, booleans, None, lists and dicts"
        raise config_error(file, [Diagnostic((), message)]) from None
    data, places = _parse(file, text)
    return YamlFile(file, data, dict.fromkeys({(): "", **places}, ""))


def parse_value(file: Path, text: str) -> Any:
    """A value of the command line, read like one of the file."""
    return _parse(file, text)[0]


def _parse(file: Path, text: str) -> tuple[Any, dict[KeyPath, str]]:
    """Plain data and the line of each key. Raises a ConfigError that lists every problem."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver = _Resolver
    reader = _NodeReader(yaml)
    try:
        node = yaml.compose(text)
        data = None if node is None else reader.value(node, (), reader.places, frozenset())
    except (YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or getattr(error, "reason", None)
        column = f", column {mark.column + 1}" if mark else ""
        message = (
            f"not valid YAML: {reason or str(error).splitlines()[0]}{column}; indent with spaces "
            "and put text that holds ': ', '{' or '%' in quotes"
        )
        raise config_error(file, [Diagnostic((), message, str(mark.line + 1) if mark else "")]) from None
    except _TooLargeError as error:
        raise config_error(file, [Diagnostic((), str(error))]) from None
    if reader.diagnostics:
        raise config_error(file, reader.diagnostics)
    return data, reader.places


class _TooLargeError(Exception):
    """Aliases make more of a file than it holds; its message says so."""


class _NodeReader:
    """Plain data of ruamel's nodes, with aliases written out, and a stop where that is too much."""

    def __init__(self, yaml: YAML) -> None:
        self._yaml = yaml
        self._num_values = 0
        self.places: dict[KeyPath, str] = {}
        self.diagnostics: list[Diagnostic] = []

    def value(self, node: Node, path: KeyPath, places: dict[KeyPath, str], above: frozenset[int]) -> Any:
        """The data of `node`; the line of each key below it goes to `places`."""
        self._num_values += 1
        if self._num_values > MAX_VALUES or len(path) > MAX_DEPTH:
            size = f"comes to more than {MAX_VALUES:,} values"
            if len(path) > MAX_DEPTH:
                size = f"is nested more than {MAX_DEPTH} deep"
            raise _TooLargeError(f"the file {size}, its anchors and aliases written out; write fewer of them")
        if isinstance(node, ScalarNode):
            return self._yaml.constructor.construct_object(node)
        line = str(node.start_mark.line + 1)
        if id(node) in above:
            self._report(line, path, "an anchor contains itself; write the values out")
            return None
        if node.tag not in _PLAIN_TAGS:
            text = f"not valid YAML: could not determine a constructor for the tag {node.tag!r}"
            self._report(line, path, f"{text}; write plain keys and values")
            return None
        above |= {id(node)}
        if isinstance(node, MappingNode):
            return self._mapping(node, path, places, above)
        places |= {(*path, index): str(item.start_mark.line + 1) for index, item in enumerate(node.value)}
        return [self.value(item, (*path, index), places, above) for index, item in enumerate(node.value)]

    def _mapping(
        self, node: MappingNode, path: KeyPath, places: dict[KeyPath, str], above: frozenset[int]
    ) -> dict[str, Any]:
        data: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        lines: dict[str, str] = {}
        for key, value in node.value:
            line = str(key.start_mark.line + 1)
            if key.tag == _MERGE:
                merged = self._merged(value, path, places, above) | merged
            elif key.tag != _STR:
                self._report(line, (*path, str(key.value)), "a key must be text; put it in quotes")
            else:
                if key.value in lines:
                    text = f"given twice, first on line {lines[key.value]}; keep one of them"
                    self._report(line, (*path, key.value), text)
                lines[key.value] = places[(*path, key.value)] = line
                data[key.value] = self.value(value, (*path, key.value), places, above)
        return merged | data

    def _merged(
        self, node: Node, path: KeyPath, places: dict[KeyPath, str], above: frozenset[int]
    ) -> dict[str, Any]:
        """Keys that come in by `<<:`; a key written beside it takes precedence and keeps its own line."""
        merged: dict[str, Any] = {}
        merged_places: dict[KeyPath, str] = {}
        for section in node.value if isinstance(node, SequenceNode) else [node]:
            if isinstance(section, MappingNode):
                merged = self.value(section, path, merged_places, above) | merged
            else:
                line = str(section.start_mark.line + 1)
                self._report(line, (*path, "<<"), "only sections can be merged; write `<<: *name`")
        for key, place in merged_places.items():
            places.setdefault(key, place)
        return merged

    def _report(self, line: str, path: KeyPath, message: str) -> None:
        self.diagnostics.append(Diagnostic(path, message, line))
