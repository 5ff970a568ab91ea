"""Keyword arguments of a pipeline file, held against the signature and annotations of what they are for.

Operators, losses, advantages, rewards and workflows are all checked here, so that all of them are reported
in the same words. Nothing is called, and every problem is found, not only the first.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from trinity_data.errors import ConfigError, unknown_name
from trinity_data.parameters import Parameters, parameters_of


@dataclass(frozen=True)
class ArgumentProblem:
    """One argument that does not fit."""

    path: tuple[str | int, ...]
    """From the top of the arguments: the name, then the place inside the value."""
    text: str

    @property
    def sentence(self) -> str:
        """For a message that shows no path: the text, after the path where the text does
        not name the argument.
        """
        names_it = not self.text.startswith("found ")
        return self.text if names_it else f"{'.'.join(map(str, self.path))}: {self.text}"


@dataclass(frozen=True)
class CheckedArguments:
    """What was given, in the types that the signature asks for, and what is wrong with it."""

    values: dict[str, Any]
    """Arguments that fit; without the defaults of those not given."""
    problems: tuple[ArgumentProblem, ...]

    @property
    def sentences(self) -> list[str]:
        """The problems as a person reads them."""
        return [problem.sentence for problem in self.problems]


def check_arguments(
    target: Callable[..., object] | Parameters,
    arguments: Mapping[str, Any],
    *,
    positional: int = 0,
    supplied: Collection[str] = (),
    keyword_only: bool = False,
    more: Collection[str] | None = None,
    finite: bool = False,
    what: str = "",
) -> CheckedArguments:
    """`arguments` as keyword arguments of a function, class or signature, as strict as JSON:
    '0.5' is no number, a list is a tuple.

    `positional`, `supplied` and `keyword_only` say which parameters can be given, as of `Parameters.given`.
    `more` replaces the `**kwargs` of a signature by these names. `finite` refuses NaN and infinities. `what`
    is for the wording: "unknown ppo argument". Where the only parameter is called `args` and is a pydantic
    model, `arguments` are the fields of that model.
    """
    parameters = target if isinstance(target, Parameters) else parameters_of(target)
    own = parameters.given(positional=positional, supplied=supplied, keyword_only=keyword_only)
    if (model := _model_among(own, parameters.hints)) is not None:
        checked = check_arguments(_parameters_of_model(model), arguments, finite=finite, what=what)
        return checked if checked.problems else _as_model(model, checked.values)
    allowed = {*own, *(more or ())}
    takes_any = parameters.takes_any and more is None
    values: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in allowed or (takes_any and name not in parameters.by_name):
            values[name] = _checked_value(name, value, parameters.hints.get(name, Any), finite=finite)
        elif allowed:
            text = unknown_name(f"{what} argument".strip(), name, allowed)
            values[name] = ArgumentProblem((name,), text)
        else:
            text = f"{what or 'it'} takes no arguments, found {name!r}"
            values[name] = ArgumentProblem((name,), text)
    problems = [value for value in values.values() if isinstance(value, ArgumentProblem)]
    for name, each in own.items():
        if each.default is each.empty and name not in arguments:
            text = f"argument {name!r} is missing; its arguments: {', '.join(sorted(allowed))}"
            problems.append(ArgumentProblem((), text))
    fitting = {name: value for name, value in values.items() if not isinstance(value, ArgumentProblem)}
    return CheckedArguments(fitting, tuple(problems))


def arguments_of(target: Callable[..., object], *, positional: int = 0) -> Parameters:
    """The arguments that a pipeline file may give to a function or class, without the leading `positional`
    ones: the fields of its pydantic model where it has one.
    """
    parameters = parameters_of(target)
    own = parameters.given(positional=positional)
    if (model := _model_among(own, parameters.hints)) is not None:
        return _parameters_of_model(model)
    return Parameters(own, parameters.hints, parameters.takes_any)


def bind_arguments(
    target: Callable[..., object], *layers: Mapping[str, object] | None, key: str, what: str
) -> dict[str, Any]:
    """The keyword-only arguments of a function or class: its defaults, replaced by each layer in turn.

    Raises a ConfigError; `key` is the arguments' place in the pipeline file, `what` as of `check_arguments`.
    """
    parameters = parameters_of(target)
    bound = {name: each.default for name, each in parameters.given(keyword_only=True).items()}
    for layer in layers:
        checked = check_arguments(parameters, layer or {}, keyword_only=True, finite=True, what=what)
        if checked.problems:
            # a sentence that begins with the path inside the arguments goes on from the key
            lines = [
                f"{key}{': ' if problem.sentence == problem.text else '.'}{problem.sentence}"
                for problem in checked.problems
            ]
            raise ConfigError("\n".join(lines))
        bound |= checked.values
    return bound


def _model_among(own: Mapping[str, inspect.Parameter], hints: Mapping[str, Any]) -> type[BaseModel] | None:
    """The pydantic model that holds all arguments."""
    hint = hints.get("args")
    return hint if [*own] == ["args"] and inspect.isclass(hint) and issubclass(hint, BaseModel) else None


def _parameters_of_model(model: type[BaseModel]) -> Parameters:
    keyword_only, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    by_name = {
        name: inspect.Parameter(
            name, keyword_only, default=empty if field.is_required() else field.get_default()
        )
        for name, field in model.model_fields.items()
    }
    hints = {name: Annotated[field.annotation, field] for name, field in model.model_fields.items()}
    return Parameters(by_name, hints, takes_any=model.model_config.get("extra") == "allow")


def _as_model(model: type[BaseModel], values: Mapping[str, Any]) -> CheckedArguments:
    """The model of arguments that fit each by itself; its own validators may refuse them together."""
    try:
        return CheckedArguments({"args": model(**values)}, ())
    except ValidationError as error:
        problems = [ArgumentProblem(each["loc"], each["msg"]) for each in error.errors()]
        return CheckedArguments({}, tuple(problems))


def _checked_value(name: str, value: Any, hint: Any, *, finite: bool) -> Any:
    """The value as its type, or what is wrong with it.

    A type that pydantic does not know lets everything pass.
    """
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(hint, config=ConfigDict(allow_inf_nan=not finite))
    except (PydanticSchemaGenerationError, PydanticUserError):
        return value
    try:
        return adapter.validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "extra_forbidden":
            *place, key = first["loc"]
            text = unknown_name("key", str(key), _keys_at(hint, place))
            return ArgumentProblem((name, *place), f"found an {text}")
        shown = repr(first["input"])
        shown = shown if len(shown) <= 80 else f"{shown[:80]}…"
        return ArgumentProblem((name, *first["loc"]), f"found {shown}; {first['msg']}")


def _keys_at(hint: Any, place: Sequence[int | str]) -> set[str]:
    """The keys that the models of a type allow at a place inside its value."""
    models = [*_models_in(hint)]
    for key in place:
        if isinstance(key, str):
            fields = [model.model_fields[key] for model in models if key in model.model_fields]
            models = [inner for field in fields for inner in _models_in(field.annotation)]
    return {name for model in models for name in model.model_fields}


def _models_in(hint: Any) -> Iterator[type[BaseModel]]:
    if inspect.isclass(hint) and issubclass(hint, BaseModel):
        yield hint
    for part in get_args(hint):
        yield from _models_in(part)
