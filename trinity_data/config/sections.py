"""From plain data to the models of sections: pydantic's errors as diagnostics in our words."""

from __future__ import annotations

from typing import Any, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from trinity_data.config.base import KeyPath, Section
from trinity_data.config.diagnostics import Diagnostic, show
from trinity_data.config.run import FILE_KEYS, RUN_KEYS, RunConfig, StageConfig
from trinity_data.errors import did_you_mean

S = TypeVar("S", bound=Section)


def build_section(section: type[S], data: Any) -> tuple[S | None, list[Diagnostic]]:
    """The section, or None and what is wrong with the data."""
    try:
        return section.model_validate(data), []
    except ValidationError as error:
        details = error.errors(include_url=False)
        return None, [Diagnostic(tuple(each["loc"]), _message(section, each)) for each in details]


def section_at(section: type[Section], path: KeyPath) -> type[Section] | None:
    """The model of the section that `path` leads to."""
    current: type[Section] | None = section
    of_each_name: type[Section] | None = None
    for part in path:
        if of_each_name is not None:
            current, of_each_name = of_each_name, None
        elif isinstance(part, str) and current is not None:
            field = current.model_fields.get(part)
            annotation = field.annotation if field else None
            by_name = get_origin(annotation) is dict
            of_each_name = section_in(get_args(annotation)[1]) if by_name else None
            current = section_in(field.annotation) if field else None
    return current


def section_in(annotation: Any) -> type[Section] | None:
    """The section that a field holds, if it holds one: itself, or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if get_origin(annotation) is dict:
        return None
    return next((section for part in get_args(annotation) if (section := section_in(part))), None)


def _message(section: type[Section], detail: ErrorDetails) -> str:
    path, kind, context = tuple(detail["loc"]), detail["type"], detail.get("ctx", {})
    if kind == "refused":
        return detail["msg"]
    if kind == "extra_forbidden":
        return _extra(section_at(section, path[:-1]), path, detail["input"])
    if kind == "missing" and isinstance(path[-1], int):
        return f"missing; a list of {path[-1] + 1} is expected"
    if kind == "missing":
        return "missing; this key has no default; write it"
    value = f"found {show(detail['input'])}"
    if kind in _EXPECTED:
        return f"{value}; {_EXPECTED[kind]}"
    if kind in _BOUNDS:
        bound = next(iter(context.values()))
        return f"{value}; allowed: {_BOUNDS[kind]} {bound if isinstance(bound, int) else f'{bound:g}'}"
    if kind == "literal_error":
        return f"{value}; allowed: {context['expected']}"
    if kind in ("too_short", "too_long"):
        return f"{value}; a list of {context.get('min_length', context.get('max_length'))} is expected"
    return f"{value}; {detail['msg']}"


_EXPECTED = {
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "a whole number is expected"),
    **dict.fromkeys(("float_parsing", "float_type", "finite_number"), "a number is expected"),
    **dict.fromkeys(
        ("byte_size", "byte_size_unit"), "a number of bytes is expected, such as 500000000, 500MB or 4GiB"
    ),
    **dict.fromkeys(("bool_parsing", "bool_type"), "true or false is expected"),
    "string_too_short": "it must not be empty",
    "string_pattern_mismatch": "letters, digits, '_', '-' and '.' are allowed",
    **dict.fromkeys(("string_type", "path_type"), "text is expected"),
    **dict.fromkeys(("tuple_type", "list_type"), "a list is expected; start each item with `- `"),
    **dict.fromkeys(
        ("model_type", "model_attributes_type", "dict_type"),
        "a section is expected; write keys and values below it",
    ),
}
_BOUNDS = {"greater_than": ">", "greater_than_equal": "≥", "less_than": "<", "less_than_equal": "≤"}


def _extra(section: type[Section] | None, path: KeyPath, value: Any) -> str:
    assert section is not None, path
    key, documented = str(path[-1]), section.documented()
    if key in documented.unsupported:
        inert = documented.unsupported[key]
        leave = f", or leave it at {show(inert)}" if inert not in (None, "") else ""
        return f"found {show(value)}; not yet supported; remove the key{leave}"
    if key in documented.managed:
        return f"found {show(value)}; the run works this out by itself; remove the key"
    if key in documented.renamed:
        return f"not a key any more; write {documented.renamed[key]}"
    if section is StageConfig and key in RUN_KEYS:
        return "belongs to the whole run; write it at the top of the file"
    if section is RunConfig and key == "stage_name":
        return "belongs to a stage; write it as `- stage_name:` below `stages:`, or remove it"
    allowed = FILE_KEYS if section is RunConfig else tuple(section.model_fields)
    places = [".".join(path) for path in _key_paths(StageConfig, ()) if path[-1] == key]
    elsewhere = f"; did you mean {' or '.join(places)}?" if 0 < len(places) <= 2 else ""
    return f"unknown key; allowed here: {', '.join(allowed)}{did_you_mean(key, allowed) or elsewhere}"


def _key_paths(section: type[Section], path: tuple[str, ...]) -> list[tuple[str, ...]]:
    paths = []
    for name, field in section.model_fields.items():
        paths.append((*path, name))
        below = section_in(field.annotation)
        if below is not None:
            paths.extend(_key_paths(below, (*path, name)))
    return paths
