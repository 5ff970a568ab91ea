"""Operators that are functions: `@filter` and `@mapper` over a table of rows, or over one row.

A function whose first parameter is called `rows` gets an Arrow table, one with `row` gets each row as a dict.
Its other parameters are the `args` of the pipeline file. It stays a plain function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar, Unpack

import numpy as np
import pyarrow as pa

from trinity_data.errors import OperatorError, unknown_name
from trinity_operators.base import Bools, Column, Filter, FilterResult, Mapper, MapperResult

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MARK = "__trinity_operator__"
_FIRST_PARAMETERS = ("rows", "row")


class Declared(TypedDict, total=False):
    """What an operator's class attributes say."""

    version: str
    whole_groups: bool
    whole_steps: bool
    after_advantage: bool
    pure: bool
    calls_model: bool
    model: str
    num_cpus: float
    num_gpus: float
    slow_start: bool


@dataclass(frozen=True)
class FunctionDeclaration:
    """A function with what its decorator says of it."""

    function: Callable[..., Any]
    kind: type[FunctionFilter] | type[FunctionMapper]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    reason: str
    declared: Declared

    def build(self, args: Mapping[str, Any]) -> FunctionFilter | FunctionMapper:
        """The operator; `args` are checked."""
        operator = self.kind(self, args)
        operator.name, operator.reads, operator.writes = self.name, self.reads, self.writes
        for attribute, value in self.declared.items():
            setattr(operator, attribute, value)
        return operator

    @property
    def name(self) -> str:
        return self.function.__name__

    def call(self, rows: pa.Table, args: Mapping[str, Any]) -> Any:
        """What the function returns for the table, or a list of what it returns for each row."""
        if not self.takes_one_row:
            return self.function(rows, **args)
        columns = rows.select(self.reads) if self.reads else rows
        return [self.function(row, **args) for row in columns.to_pylist(maps_as_pydicts="lossy")]

    @property
    def takes_one_row(self) -> bool:
        """Whether its first parameter is called `row`."""
        return next(iter(inspect.signature(self.function).parameters)) == "row"


class FunctionFilter(Filter):
    """Keeps the rows for which a function is true."""

    def __init__(self, declaration: FunctionDeclaration, args: Mapping[str, Any]) -> None:
        self.declaration, self.args = declaration, args

    def apply(self, rows: pa.Table) -> FilterResult:
        result = self.declaration.call(rows, self.args)
        if isinstance(result, FilterResult):
            return result
        return FilterResult(_as_bools(self.name, result), self.declaration.reason or self._reason())

    def _reason(self) -> str:
        arguments = inspect.signature(self.declaration.function).bind(None, **self.args)
        arguments.apply_defaults()
        shown = [f"{name}={value!r}" for name, value in list(arguments.arguments.items())[1:]]
        return f"{self.name}({', '.join(shown)}) is false"


class FunctionMapper(Mapper):
    """Writes the columns that a function returns."""

    def __init__(self, declaration: FunctionDeclaration, args: Mapping[str, Any]) -> None:
        self.declaration, self.args = declaration, args

    def map(self, rows: pa.Table) -> Mapping[str, Column] | MapperResult:
        result = self.declaration.call(rows, self.args)
        if self.declaration.takes_one_row:
            return self._columns(result)
        if isinstance(result, Mapping | MapperResult):
            return result
        return {self._only_column("a column"): result}

    def _columns(self, results: list[Any]) -> dict[str, list[Any]]:
        """Of what the function returned for each row: a dict, or the value of the only column."""
        columns: dict[str, list[Any]] = {name: [] for name in self.writes}
        for result in results:
            values = result if isinstance(result, Mapping) else {self._only_column(repr(result)): result}
            if values.keys() != columns.keys():
                found = ", ".join(map(repr, values)) or "nothing"
                raise OperatorError(
                    f"{self.name!r} returned {found} for a row; it declares {', '.join(self.writes)}"
                )
            for name, value in values.items():
                columns[name].append(value)
        return columns

    def _only_column(self, result: str) -> str:
        if len(self.writes) != 1:
            raise OperatorError(
                f"{self.name!r} returned {result}; it writes {', '.join(self.writes)}: return a dict of these"
            )
        return self.writes[0]


def filter(
    *, reads: tuple[str, ...] = (), reason: str = "", **declared: Unpack[Declared]
) -> Callable[[_Function], _Function]:
    """Makes a function an operator that keeps the rows for which it is true.

    Over a table it returns booleans or a `FilterResult`, over one row a boolean. `reads` are the columns it
    needs, and of a row the only ones it gets; `reason` is why the others are dropped.
    """
    return _declare(FunctionFilter, reads, (), reason, declared)


def mapper(
    *, reads: tuple[str, ...] = (), writes: tuple[str, ...], **declared: Unpack[Declared]
) -> Callable[[_Function], _Function]:
    """Makes a function an operator that writes columns.

    Over a table it returns them by name, over one row their values by name; the value alone where it `writes`
    one column. `reads` as of `filter`.
    """
    return _declare(FunctionMapper, reads, writes, "", declared)


def declaration_of(candidate: object) -> FunctionDeclaration | None:
    """What a decorator says of a function."""
    declaration = getattr(candidate, _MARK, None)
    return declaration if isinstance(declaration, FunctionDeclaration) else None


def _declare(
    kind: type[FunctionFilter] | type[FunctionMapper],
    reads: tuple[str, ...],
    writes: tuple[str, ...],
    reason: str,
    declared: Declared,
) -> Callable[[_Function], _Function]:
    for what, names in (("reads", reads), ("writes", writes)):
        if isinstance(names, str):
            raise OperatorError(f"{what} is the text {names!r}; write the names as a tuple: ({names!r},)")
    if unknown := declared.keys() - Declared.__annotations__.keys():
        raise OperatorError(unknown_name("declaration", min(unknown), Declared.__annotations__))

    def decorate(function: _Function) -> _Function:
        first = next(iter(inspect.signature(function).parameters), "nothing")
        if first not in _FIRST_PARAMETERS:
            raise OperatorError(
                f"{function.__name__!r} takes {first!r} first; call it `rows` to get a table, "
                "or `row` to get one row at a time"
            )
        declaration = FunctionDeclaration(function, kind, tuple(reads), tuple(writes), reason, declared)
        setattr(function, _MARK, declaration)
        return function

    return decorate


def _as_bools(name: str, result: Any) -> Bools:
    array = (
        result.to_numpy(zero_copy_only=False) if isinstance(result, pa.Array | pa.ChunkedArray) else result
    )
    keep = np.asarray(array)
    if keep.dtype != np.bool_ or keep.ndim != 1:
        example = next((each for each in np.atleast_1d(keep).tolist() if not isinstance(each, bool)), result)
        raise OperatorError(f"{name!r} returned {example!r}; a filter returns True or False for each row")
    return keep
