"""The `*_args` of a pipeline file, held against the signature of the function they are for.

Given arguments replace single defaults, never all of them; a name or a type that does not fit is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field

from trinity_data.arguments import ArgumentProblem, check_arguments
from trinity_data.errors import ConfigError

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
AboveOne = Annotated[float, Field(gt=1)]


def kl_coefficient(*, kl_coef: NonNegative = 0.001) -> float:
    """The `kl_loss_fn_args`: what the KL is multiplied by in the loss."""
    return kl_coef


def entropy_coefficient(*, entropy_coef: float = 0.0) -> float:
    """The `entropy_loss_fn_args`: what the entropy is multiplied by before it is taken off the loss."""
    return entropy_coef


def keyword_defaults(function: Callable[..., object]) -> dict[str, Any]:
    """The keyword-only arguments of a loss and their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def merge_arguments(
    function: Callable[..., object], *layers: Mapping[str, object] | None, key: str, what: str
) -> dict[str, Any]:
    """The function's defaults under each layer in turn; `key` and `what` are for the message."""
    merged = keyword_defaults(function)
    for layer in layers:
        checked = check_arguments(function, layer or {}, keyword_only=True, finite=True, what=what)
        if checked.problems:
            raise ConfigError("\n".join(_line(problem, key) for problem in checked.problems))
        merged |= checked.values
    return merged


def _line(problem: ArgumentProblem, key: str) -> str:
    about_its_value = problem.sentence != problem.text
    return f"{key}{'.' if about_its_value else ': '}{problem.sentence}"
