"""The parameters of a function or class, with their types.

Light: the processes of workflows load it, and not pydantic, which checks arguments against them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, get_type_hints

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Parameters:
    """The arguments of a function, or of the class that it makes."""

    by_name: Mapping[str, inspect.Parameter]
    hints: Mapping[str, Any]
    takes_any: bool
    """Whether it has `**kwargs`."""

    @property
    def required(self) -> list[str]:
        """Those without a default."""
        return [name for name, each in self.by_name.items() if each.default is each.empty]

    def given(
        self, *, positional: int = 0, supplied: Collection[str] = (), keyword_only: bool = False
    ) -> dict[str, inspect.Parameter]:
        """Those that a pipeline file may give: the caller fills in the leading `positional` ones and those of
        `supplied`; with `keyword_only` none before the `*`.
        """
        return {
            name: each
            for index, (name, each) in enumerate(self.by_name.items())
            if index >= positional and name not in supplied
            if each.kind is each.KEYWORD_ONLY or not keyword_only
        }


def parameters_of(target: Callable[..., object]) -> Parameters:
    """Of a class those of its `__init__`; where that takes `**kwargs`, those of the base classes as well."""
    if inspect.isclass(target):
        return _parameters_of_class(target)
    own = _named(inspect.signature(target).parameters.values())
    takes_any = any(each.kind is each.VAR_KEYWORD for each in inspect.signature(target).parameters.values())
    return Parameters(own, _hints(target), takes_any)


def _parameters_of_class(kind: type) -> Parameters:
    by_name: dict[str, inspect.Parameter] = {}
    hints: dict[str, Any] = {}
    for base in kind.__mro__:
        if "__init__" not in vars(base) or base is object:
            continue
        init = vars(base)["__init__"]
        own = list(inspect.signature(init).parameters.values())[1:]
        by_name = _named(own) | by_name
        # an annotation may name a class that stands inside this one
        hints = _hints(init, dict(vars(base))) | hints
        if not any(each.kind is each.VAR_KEYWORD for each in own):
            return Parameters(by_name, hints, takes_any=False)
    return Parameters(by_name, hints, takes_any=bool(by_name))


def _named(parameters: Collection[inspect.Parameter]) -> dict[str, inspect.Parameter]:
    return {each.name: each for each in parameters if each.kind not in _VARIABLE}


def _hints(target: Any, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """The types of the arguments; none where an annotation cannot be read."""
    while isinstance(target, partial):
        target = target.func
    if not inspect.isroutine(target) and callable(target):
        target = type(target).__call__
    try:
        return get_type_hints(target, localns=names, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}
