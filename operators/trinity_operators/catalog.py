"""The operators that a pipeline file may name, and what each of them takes, reads and writes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from trinity_data.arguments import arguments_of
from trinity_data.errors import ConfigError
from trinity_operators.advantages import GroupAdvantage
from trinity_operators.base import Expander, Filter, Mapper, Operator, OperatorSpecError
from trinity_operators.data_juicer.signatures import describe as describe_data_juicer
from trinity_operators.data_juicer.signatures import surveyed
from trinity_operators.data_juicer.sources import data_juicer_files, read_source
from trinity_operators.functions import FunctionDeclaration, FunctionFilter, declaration_of
from trinity_operators.registry import (
    ENTRY_POINTS,
    OPERATORS,
    load_object,
    operator_named,
)

BUILT_IN, DATA_JUICER = "built in", "Data-Juicer"
REQUIRED = "required"
_KINDS = {GroupAdvantage: "advantage", Filter: "filter", Mapper: "mapper", Expander: "expander"}
_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
    "minLength": "length at least",
    "maxLength": "length at most",
    "pattern": "matches",
}
"""Of JSON Schema."""


@dataclass(frozen=True)
class CatalogEntry:
    """An operator in one line."""

    name: str
    kind: str
    """`filter`, `mapper`, `expander`, `advantage`; of Data-Juicer the name of its family."""
    source: str
    """`built in`, `Data-Juicer`, or the package that offers it."""
    summary: str


@dataclass(frozen=True)
class Argument:
    """One of the `args` of a pipeline file."""

    name: str
    type: str
    default: str
    """As Python writes it; `required` where there is none."""
    bounds: str
    meaning: str = ""


@dataclass(frozen=True)
class Description:
    """All that is known of an operator before it runs."""

    entry: CatalogEntry
    doc: str
    version: str
    arguments: tuple[Argument, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    declared: Mapping[str, Any]
    """Attributes of `Operator` that are not its defaults: `whole_groups`, `num_gpus`, …"""


def catalog() -> list[CatalogEntry]:
    """Built-in operators, those of installed packages, Data-Juicer's that run here, each by name."""
    return [
        *(_entry(name, kind, BUILT_IN) for name, kind in sorted(OPERATORS.items())),
        *map(_offered, sorted(entry_points(group=ENTRY_POINTS), key=lambda each: each.name)),
        *(_data_juicer_entry(name) for name in sorted(surveyed())),
    ]


def describe(name: str, base_dir: Path) -> Description:
    """The operator of that name, as `build_operator` finds it.

    Raises OperatorSpecError where there is none.
    """
    kind = operator_named(name, base_dir)
    if kind is None:
        return _describe_data_juicer(name)
    declaration = declaration_of(kind)
    if declaration is None and not (inspect.isclass(kind) and issubclass(kind, Operator)):
        raise OperatorSpecError(f"{name!r} is not an operator")
    target: Any = kind if declaration is None else declaration.function
    arguments = tuple(_arguments(target, positional=0 if declaration is None else 1))
    operator = _declared_by(kind, declaration, arguments)
    offered = next(iter(entry_points(group=ENTRY_POINTS, name=name)), None)
    source = BUILT_IN if name in OPERATORS else _package(offered) if offered else str(base_dir)
    return Description(
        _entry(name, kind, source), inspect.cleandoc(target.__doc__ or ""), operator.version, arguments,
        tuple(operator.reads), tuple(operator.writes), _not_defaults(operator),
    )  # fmt: skip


def _entry(name: str, kind: object, source: str) -> CatalogEntry:
    declaration = declaration_of(kind)
    if declaration is not None:
        family = "filter" if declaration.kind is FunctionFilter else "mapper"
        return CatalogEntry(name, family, source, _first_sentence(declaration.function.__doc__))
    family = next(
        (label for base, label in _KINDS.items() if inspect.isclass(kind) and issubclass(kind, base)),
        "not an operator",
    )
    return CatalogEntry(name, family, source, _first_sentence(kind.__doc__))


def _offered(point: EntryPoint) -> CatalogEntry:
    """An operator of an installed package, which may fail to load."""
    try:
        return _entry(point.name, load_object(point.value, Path()), _package(point))
    except ConfigError as error:
        return CatalogEntry(point.name, "not loaded", _package(point), str(error))


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value


def _data_juicer_entry(name: str) -> CatalogEntry:
    file = data_juicer_files()[name]
    return CatalogEntry(name, file.parent.name, DATA_JUICER, _first_sentence(read_source(file).doc))


def _describe_data_juicer(name: str) -> Description:
    source, operator = read_source(data_juicer_files()[name]), Operator()
    describe_data_juicer(operator, name, {})
    arguments = tuple(
        Argument(each.name, each.type, REQUIRED if each.default is None else each.default, "", each.meaning)
        for each in source.arguments
    )
    return Description(
        _data_juicer_entry(name), source.doc, operator.version, arguments,
        ("text_key, which is the prompt of a task and the response of an experience",), operator.writes,
        _not_defaults(operator),
    )  # fmt: skip


def _declared_by(
    kind: Any, declaration: FunctionDeclaration | None, arguments: tuple[Argument, ...]
) -> Operator | type[Operator]:
    """The operator with its defaults, on which attributes may be set; the class where it needs arguments."""
    if declaration is not None:
        return declaration.build({})
    if any(each.default == REQUIRED for each in arguments):
        return cast("type[Operator]", kind)
    # the boundary to code of other people: what it cannot say without arguments, the class says
    try:
        built: Operator = kind()
        return built
    except Exception:
        return cast("type[Operator]", kind)


def _not_defaults(operator: Operator | type[Operator]) -> dict[str, Any]:
    shown = [name for name in Operator.__annotations__ if name not in ("name", "version", "reads", "writes")]
    values = {name: getattr(operator, name) for name in shown}
    return {name: value for name, value in values.items() if value != getattr(Operator, name)}


def _arguments(target: Callable[..., object], *, positional: int) -> Iterator[Argument]:
    parameters = arguments_of(target, positional=positional)
    for name, each in parameters.by_name.items():
        hint = parameters.hints.get(name, Any)
        default = REQUIRED if each.default is each.empty else repr(each.default)
        yield Argument(name, _type_name(hint), default, _bounds(hint))


def _type_name(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        return _type_name(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return " | ".join(map(repr, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(map(_type_name, get_args(hint)))
    if hint is type(None):
        return "None"
    return "any" if hint is Any else inspect.formatannotation(hint).replace("collections.abc.", "")


def _bounds(hint: Any) -> str:
    """What JSON Schema says of the values of a type; empty for a type that it does not know."""
    try:
        schema = TypeAdapter(hint).json_schema()
    except (PydanticSchemaGenerationError, PydanticUserError):
        return ""
    # of `int | None` the schema of the int
    options = schema.get("anyOf", [schema])
    return ", ".join(
        f"{words} {option[key]}" for option in options for key, words in _BOUNDS.items() if key in option
    )


def _first_sentence(doc: str | None) -> str:
    paragraph = " ".join(inspect.cleandoc(doc or "").split("\n\n")[0].split())
    return paragraph.split(". ")[0].removesuffix(".").rstrip(":")
