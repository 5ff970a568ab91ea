"""The `*_args` of a pipeline file, held against the signature of the function they are for.

Given arguments replace single defaults, never all of them; a name or a type that does not fit is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from trinity_data.errors import ConfigError, unknown_name

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
AboveOne = Annotated[float, Field(gt=1)]


def keyword_defaults(function: Callable[..., object]) -> dict[str, Any]:
    """The keyword-only arguments of a loss and their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def merge_arguments(
    function: Callable[..., object], *layers: Mapping[str, object] | None, key: str, what: str
) -> dict[str, Any]:
    """The function's defaults under each layer in turn; `key` and `what` are for the message."""
    merged = keyword_defaults(function)
    known, hints = set(merged), get_type_hints(function, include_extras=True)
    for layer in layers:
        for name, value in (layer or {}).items():
            if name not in known:
                unknown = (
                    unknown_name(f"{what} argument", name, known)
                    if known
                    else f"{what} takes no arguments, found {name!r}"
                )
                raise ConfigError(f"{key}: {unknown}")
            merged[name] = checked_value(value, hints[name], key=f"{key}.{name}")
    return merged


def checked_value(value: object, hint: Any, *, key: str) -> Any:
    """The value as the type that the signature names; ConfigError if it is not one."""
    adapter: TypeAdapter[Any] = TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False))
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        expected = error.errors()[0]["msg"]
        raise ConfigError(f"{key}: found {value!r}; {expected[0].lower()}{expected[1:]}") from None
