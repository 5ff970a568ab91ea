"""What every section of a pipeline file shares: it is frozen and refuses unknown keys.

`unsupported.py` lists the documents' keys that are no fields.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from trinity_data.config.unsupported import DOCUMENTED_KEYS, SectionKeys
from trinity_data.errors import did_you_mean

KeyPath = tuple[str | int, ...]
"""Names of keys and numbers of list items, from the top of a file or of a stage."""
NOTHING: tuple[object, ...] = ("", [], {})
_KINDS = {
    int: "a whole number",
    float: "a number",
    ByteSize: "a number of bytes",
    str: "text (put it in quotes)",
    Path: "text (put it in quotes)",
}


def requests_nothing(value: object, inert: object) -> bool:
    """Whether a value of an unsupported key changes nothing; `inert` is the one that never does."""
    if isinstance(value, bool) or isinstance(inert, bool):
        return value is inert or (value is False and inert is None)
    return value in NOTHING or value == inert


def derived(value: object, text: str, **constraints: Any) -> Any:
    """A field whose default follows from other keys; `value` stands in until then and is never validated."""
    return Field(default=value, json_schema_extra={"derived": text}, **constraints)


def refused(problem: str, allowed: str, todo: str) -> PydanticCustomError:
    """A problem in the three parts every message has."""
    text = "; ".join(part for part in (problem, allowed, todo) if part)
    return PydanticCustomError("refused", "{text}", {"text": text})


class Section(BaseModel):
    """Null means "not given"; an unsupported key may stand in the file as long as it requests nothing."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        coerce_numbers_to_str=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    choices: ClassVar[Mapping[str, Collection[str]]] = {}
    """By field, the names it takes, where its type does not list them."""

    @classmethod
    def documented(cls) -> SectionKeys:
        """The documents' keys that are no fields of this section."""
        return DOCUMENTED_KEYS.get(cls.__name__, SectionKeys())

    @model_validator(mode="before")
    @classmethod
    def _drop_keys_that_request_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        unsupported = cls.documented().unsupported
        return {
            key: value
            for key, value in data.items()
            if value is not None and not (key in unsupported and requests_nothing(value, unsupported[key]))
        }

    @field_validator("*", mode="before")
    @classmethod
    def _check_the_choice(cls, value: Any, info: ValidationInfo) -> Any:
        name = info.field_name or ""
        annotation = cls.model_fields[name].annotation
        if isinstance(value, bool) and not _takes_bool(annotation):
            kinds = {annotation, *get_args(annotation)}
            wanted = next((words for kind, words in _KINDS.items() if kind in kinds), "another kind of value")
            raise refused(f"found {str(value).lower()}", f"{wanted} is expected", "")
        if name in cls.choices and isinstance(value, int | float):
            value = str(value)
        if not isinstance(value, str):
            return value
        value = cls.documented().aliases.get(name, {}).get(value, value)
        allowed = allowed_values(cls, name)
        for literal in _literals(annotation):
            # text from the environment stands for a number too: `${oc.env:NUM_RANKS,1}`
            if not isinstance(literal, str) and str(literal) == value.strip():
                return literal
        if value in cls.documented().unsupported_values.get(name, ()):
            raise refused(f"{value!r} is not yet supported", f"allowed: {', '.join(allowed)}", "")
        if allowed and value not in allowed:
            near = did_you_mean(value, allowed)
            raise refused(f"unknown value {value!r}", f"allowed: {', '.join(allowed)}{near}", "")
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


def _takes_bool(annotation: Any) -> bool:
    if annotation in (bool, Any):
        return True
    if get_origin(annotation) in (tuple, list, dict):
        return False
    return any(_takes_bool(part) for part in get_args(annotation)) or isinstance(annotation, bool)
