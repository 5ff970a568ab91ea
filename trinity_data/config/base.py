"""What every section of a pipeline file shares: frozen, no unknown keys,
and a say about keys that are not there yet.

A key is in exactly one of: the fields, `not_yet`, `computed`, `moved`. Anything else is a misspelling.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from trinity_data.errors import did_you_mean

NOTHING: tuple[object, ...] = ("", [], {})


def derived(value: object, text: str, **constraints: Any) -> Any:
    """A field whose default follows from other keys; `value` stands in until then and is never validated."""
    return Field(default=value, json_schema_extra={"derived": text}, **constraints)


def refused(found: str, allowed: str, todo: str) -> PydanticCustomError:
    """A problem in the three parts every message has."""
    text = "; ".join(part for part in (found, allowed, todo) if part)
    return PydanticCustomError("refused", "{text}", {"text": text})


class Section(BaseModel):
    """Null means "not given"; a key of `not_yet` may stand in the file as long as it asks for nothing."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        coerce_numbers_to_str=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    not_yet: ClassVar[Mapping[str, object]] = {}
    """Keys of the documents that this version cannot serve, each with the value that asks for nothing."""
    not_yet_values: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    computed: ClassVar[Collection[str]] = ()
    """Keys that other tools fill in by themselves and a person never sets."""
    moved: ClassVar[Mapping[str, str]] = {}
    """Old spellings, each with the key's path of today."""
    choices: ClassVar[Mapping[str, Collection[str]]] = {}
    same_as: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """Values with two spellings, and the one we keep."""

    @model_validator(mode="before")
    @classmethod
    def _drop_keys_that_ask_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {
            key: value for key, value in data.items() if value is not None and not cls._is_inert(key, value)
        }

    @classmethod
    def _is_inert(cls, key: str, value: object) -> bool:
        if key not in cls.not_yet:
            return False
        inert = cls.not_yet[key]
        if isinstance(value, bool) or isinstance(inert, bool):
            return value is inert or (value is False and inert is None)
        return value in NOTHING or value == inert

    @field_validator("*", mode="before")
    @classmethod
    def _check_the_choice(cls, value: Any, info: ValidationInfo) -> Any:
        name = info.field_name or ""
        if isinstance(value, bool) and not _takes_bool(cls.model_fields[name].annotation):
            found, wanted = f"found {str(value).lower()}", _expected(cls.model_fields[name].annotation)
            raise refused(found, f"{wanted} is expected", "")
        if name in cls.choices and isinstance(value, int | float):
            value = str(value)
        if not isinstance(value, str):
            return value
        value = cls.same_as.get(name, {}).get(value, value)
        allowed = allowed_values(cls, name)
        for literal in _literals(cls.model_fields[name].annotation):
            # text from the environment stands for a number too: `${oc.env:NUM_RANKS,1}`
            if not isinstance(literal, str) and str(literal) == value.strip():
                return literal
        if value in cls.not_yet_values.get(name, ()):
            raise refused(f"{value!r} is not yet supported", f"allowed: {', '.join(allowed)}", "")
        if allowed and value not in allowed:
            raise refused(
                f"unknown value {value!r}", f"allowed: {', '.join(allowed)}{did_you_mean(value, allowed)}", ""
            )
        return value


def allowed_values(section: type[Section], name: str) -> tuple[str, ...]:
    """The words a field takes, or none where it takes more than words."""
    if name in section.choices:
        return tuple(section.choices[name])
    return tuple(
        value for value in _literals(section.model_fields[name].annotation) if isinstance(value, str)
    )


def _literals(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(
        value for part in get_args(annotation) for value in _literals(part) if part is not type(None)
    )


def _expected(annotation: Any) -> str:
    kinds = {annotation, *get_args(annotation)}
    if int in kinds:
        return "a whole number"
    if float in kinds:
        return "a number"
    if kinds & {str, Path}:
        return "text (put it in quotes)"
    return "another kind of value"


def _takes_bool(annotation: Any) -> bool:
    if annotation in (bool, Any):
        return True
    if get_origin(annotation) in (tuple, list, dict):
        return False
    return any(_takes_bool(part) for part in get_args(annotation)) or isinstance(annotation, bool)
