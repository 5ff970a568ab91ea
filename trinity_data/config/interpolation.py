"""`${oc.env:NAME,default}` and `${a.b}`, by OmegaConf, with every failure and not only the first.

An interpolation sees the file as written, after overrides and before stages inherit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError, InterpolationKeyError, OmegaConfBaseException

from trinity_data.config.diagnostics import KeyPath, Problem, config_error, show
from trinity_data.config.expansion import ExpansionError, check_expansion, check_text
from trinity_data.config.secrets import secrets_of_the_environment
from trinity_data.config.yaml_file import YamlFile


def resolve_interpolations(source: YamlFile) -> None:
    """Replaces every interpolation in `source.data` by its value."""
    texts = list(_texts(source.data, ()))
    mandatory = [path for path, text in texts if text == "???"]
    if mandatory:
        todo = "found ???, which stands for a value that must be given; write it here or as an override"
        raise config_error(source.file, [Problem(source.place(p), source.label(p), todo) for p in mandatory])
    spots = [(path, text) for path, text in texts if "${" in text]
    if not spots:
        return
    problems = [problem for path, text in spots for problem in _syntax(source, path, text)]
    if problems:
        raise config_error(source.file, problems)
    try:
        check_expansion(source.data)
    except ExpansionError as error:
        raise config_error(source.file, [Problem("", "", f"{error}; write values out")]) from None
    config = OmegaConf.create(source.data)
    problems = [problem for path, text in spots for problem in _lookup(source, config, path, text)]
    if problems:
        raise config_error(source.file, problems)
    resolved = OmegaConf.to_container(config, resolve=True)
    assert isinstance(resolved, dict)
    source.interpolated = dict(spots)
    source.secrets |= secrets_of_the_environment(text for _, text in spots)
    source.data = {str(key): value for key, value in resolved.items()}


def _texts(data: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(data, str):
        yield path, data
    elif isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _texts(value, (*path, key))


def _syntax(source: YamlFile, path: KeyPath, text: str) -> Iterator[Problem]:
    try:
        OmegaConf.create({"text": text})["text"]
    except GrammarParseError:
        yield Problem(
            source.place(path),
            source.label(path),
            (
                f"found {show(text)}, which is no interpolation; allowed: "
                f"${{a.b}} and ${{oc.env:NAME,default}}; write \\${{ for the text itself"
            ),
        )
    except OmegaConfBaseException:
        pass
    try:
        check_text(text)
    except ExpansionError as error:
        yield Problem(source.place(path), source.label(path), str(error))


def _lookup(source: YamlFile, config: Any, path: KeyPath, text: str) -> Iterator[Problem]:
    here = config
    try:
        for part in path:
            here = here[part]
    except OmegaConfBaseException as error:
        yield Problem(source.place(path), source.label(path), f"found {show(text)}; {_reason(error)}")


def _reason(error: OmegaConfBaseException) -> str:
    first = str(error).splitlines()[0]
    if "Environment variable" in first:
        name = first.split("'")[1]
        return (
            f"the environment variable {name} is not set; set it, or give a default: "
            f"${{oc.env:{name},default}}"
        )
    if isinstance(error, InterpolationKeyError):
        return f"the file has no key {first.split(chr(39))[1]!r}; write the key, or its value here"
    if "Recursive" in first:
        return "it refers to itself; write the value out"
    return f"it cannot be resolved ({first}); allowed: ${{a.b}} and ${{oc.env:NAME,default}}"
