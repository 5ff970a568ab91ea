"""`${oc.env:NAME,default}` and `${a.b}`, by OmegaConf, with every failure and not only the first.

An interpolation sees the file as written, after overrides and before stages inherit.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import getitem
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import (
    GrammarParseError,
    InterpolationKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from trinity_data.config.base import KeyPath
from trinity_data.config.diagnostics import Diagnostic, Diagnostics, config_error, show
from trinity_data.config.expansion import ExpansionError, check_expansion, check_text
from trinity_data.config.secrets import secrets_of_the_environment
from trinity_data.config.yaml_file import YamlFile


def resolve_interpolations(file: YamlFile) -> None:
    """Replaces every interpolation in `file.data` by its value."""
    diagnostics = Diagnostics(file)
    interpolated = {path: text for path, text in _texts(file.data, ()) if "${" in text or text == "???"}
    if not interpolated:
        return
    for path, text in interpolated.items():
        diagnostics.extend(Diagnostic(path, message) for message in _syntax_errors(text))
    diagnostics.raise_if_any()
    try:
        check_expansion(file.data)
    except ExpansionError as error:
        raise config_error(file.file, [Diagnostic((), f"{error}; write values out")]) from None
    config: Any = OmegaConf.create(file.data)
    for path, text in interpolated.items():
        try:
            reduce(getitem, path, config)
        except OmegaConfBaseException as error:
            diagnostics.add(path, f"found {show(text)}; {_reason(error)}")
    diagnostics.raise_if_any()
    file.interpolated = interpolated
    file.secrets |= secrets_of_the_environment(interpolated.values())
    resolved: Any = OmegaConf.to_container(config, resolve=True)
    file.data = {str(key): value for key, value in resolved.items()}


def _texts(data: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(data, str):
        yield path, data
    elif isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _texts(value, (*path, key))


def _syntax_errors(text: str) -> Iterator[str]:
    try:
        OmegaConf.create({"text": text})["text"]
    except GrammarParseError:
        allowed = "${a.b} and ${oc.env:NAME,default}; write \\${ for the text itself"
        yield f"found {show(text)}, which is no interpolation; allowed: {allowed}"
    except OmegaConfBaseException:
        pass
    try:
        check_text(text)
    except ExpansionError as error:
        yield str(error)


def _reason(error: OmegaConfBaseException) -> str:
    first = str(error).splitlines()[0]
    if "Environment variable" in first:
        name = first.split("'")[1]
        return (
            f"the environment variable {name} is not set; set it, or give a default: "
            f"${{oc.env:{name},default}}"
        )
    if isinstance(error, MissingMandatoryValue):
        return "it stands for a value that must be given; write it here or as an override"
    if isinstance(error, InterpolationKeyError):
        return f"the file has no key {first.split(chr(39))[1]!r}; write the key, or its value here"
    if "Recursive" in first:
        return "it refers to itself; write the value out"
    return f"it cannot be resolved ({first}); allowed: ${{a.b}} and ${{oc.env:NAME,default}}"
