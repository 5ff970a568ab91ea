"""Operators that are functions: `@filter` and `@mapper` over a table of rows, or over one row.

A function whose first parameter is called `rows` gets an Arrow table, one with `row` gets each row as a dict;
an `async` function of a `row` is asked about many rows at once. Its other parameters are the `args` of the
pipeline file. It stays a plain function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict, TypeVar, Unpack

import numpy as np
import pyarrow as pa

from trinity_data.errors import OperatorError, unknown_name
from trinity_operators.asynchronous import AsyncFilter, AsyncMapper, Row
from trinity_operators.base import (
    Bools,
    Column,
    Filter,
    FilterResult,
    Mapper,
    MapperResult,
    Operator,
    checked_arguments,
)
from trinity_operators.checks import only_column, written_columns
from trinity_operators.row_answer import RowAnswer, as_answer, total_of

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MARK = "__trinity_operator__"
_FIRST_PARAMETERS = ("rows", "row")


class Declared(TypedDict, total=False):
    """What an operator's class attributes say."""

    version: str
    looks_up: tuple[str, ...]
    whole_groups: bool
    whole_steps: bool
    after_advantage: bool
    pure: bool
    idempotent: bool
    calls_model: bool
    model: str
    num_cpus: float
    num_gpus: float
    slow_start: bool
    max_in_flight: int
    row_timeout: float


@dataclass(frozen=True)
class FunctionDeclaration:
    """A function with what its decorator says of it."""

    function: Callable[..., Any]
    kind: type[FunctionFilter] | type[FunctionMapper]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    reason: str
    declared: Declared

    def build(self, args: Mapping[str, Any]) -> FunctionOperator:
        """The operator; `args` are checked."""
        kind: Callable[[FunctionDeclaration, Mapping[str, Any]], FunctionOperator] = self.kind
        if inspect.iscoroutinefunction(self.function):
            kind = FunctionAsyncFilter if self.kind is FunctionFilter else FunctionAsyncMapper
        operator = kind(self, args)
        operator.name, operator.reads, operator.writes = self.name, self.reads, self.writes
        for attribute, value in self.declared.items():
            setattr(operator, attribute, value)
        return operator

    @property
    def name(self) -> str:
        return self.function.__name__

    def answers(self, rows: pa.Table, args: Mapping[str, Any]) -> list[RowAnswer]:
        """What a function of one row says of each."""
        columns = rows.select(self.reads) if self.reads else rows
        return [as_answer(self.function(row, **args)) for row in columns.to_pylist(maps_as_pydicts="lossy")]

    def default_reason(self, args: Mapping[str, Any]) -> str:
        """Why a filter drops a row, where the function does not say it."""
        if self.reason:
            return self.reason
        arguments = inspect.signature(self.function).bind(None, **args)
        arguments.apply_defaults()
        shown = [f"{name}={value!r}" for name, value in list(arguments.arguments.items())[1:]]
        return f"{self.name}({', '.join(shown)}) is false"

    @property
    def takes_one_row(self) -> bool:
        """Whether its first parameter is called `row`."""
        return next(iter(inspect.signature(self.function).parameters)) == "row"


class FunctionFilter(Filter):
    """Keeps the rows for which a function is true."""

    def __init__(self, declaration: FunctionDeclaration, args: Mapping[str, Any]) -> None:
        self.declaration, self.args = declaration, args

    def apply(self, rows: pa.Table) -> FilterResult:
        default = self.declaration.default_reason(self.args)
        if self.declaration.takes_one_row:
            answers = self.declaration.answers(rows, self.args)
            return FilterResult(
                _as_bools(self.name, [answer.value for answer in answers]),
                [answer.reason or default for answer in answers],
                totals=total_of(answers),
            )
        result = self.declaration.function(rows, **self.args)
        if isinstance(result, FilterResult):
            return result
        return FilterResult(_as_bools(self.name, result), default)


class FunctionMapper(Mapper):
    """Writes the columns that a function returns."""

    def __init__(self, declaration: FunctionDeclaration, args: Mapping[str, Any]) -> None:
        self.declaration, self.args = declaration, args

    def map(self, rows: pa.Table) -> Mapping[str, Column] | MapperResult:
        if self.declaration.takes_one_row:
            answers = self.declaration.answers(rows, self.args)
            return MapperResult(
                written_columns(self, [answer.value for answer in answers]),
                reason=[answer.reason for answer in answers],
                totals=total_of(answers),
            )
        result = self.declaration.function(rows, **self.args)
        if isinstance(result, Mapping | MapperResult):
            return result
        return {only_column(self, "a column"): result}


class FunctionAsyncFilter(AsyncFilter):
    """Keeps the rows for which an `async` function of one row is true."""

    def __init__(self, declaration: FunctionDeclaration, args: Mapping[str, Any]) -> None:
        self.declaration, self.args = declaration, args
        self.default_reason = declaration.default_reason(args)

    async def keeps(self, row: Row) -> Any:
        return await self.declaration.function(row, **self.args)


class FunctionAsyncMapper(AsyncMapper):
    """Writes the columns that an `async` function of one row returns."""

    def __init__(self, declaration: FunctionDeclaration, args: Mapping[str, Any]) -> None:
        self.declaration, self.args = declaration, args

    async def map_row(self, row: Row) -> Any:
        return await self.declaration.function(row, **self.args)


FunctionOperator: TypeAlias = FunctionFilter | FunctionMapper | FunctionAsyncFilter | FunctionAsyncMapper


def filter(
    *, reads: tuple[str, ...] = (), reason: str = "", **declared: Unpack[Declared]
) -> Callable[[_Function], _Function]:
    """Makes a function an operator that keeps the rows for which it is true.

    Over a table it returns booleans or a `FilterResult`, over one row a boolean or a `RowAnswer`. `reads` are
    the columns it needs, and of a row the only ones it gets; `reason` is why the others are dropped.
    """
    return _declare(FunctionFilter, reads, (), reason, declared)


def mapper(
    *, reads: tuple[str, ...] = (), writes: tuple[str, ...], **declared: Unpack[Declared]
) -> Callable[[_Function], _Function]:
    """Makes a function an operator that writes columns.

    Over a table it returns them by name, over one row their values by name; the value alone where it `writes`
    one column. Of one row a `RowAnswer` says more. `reads` as of `filter`.
    """
    return _declare(FunctionMapper, reads, writes, "", declared)


def declaration_of(candidate: object) -> FunctionDeclaration | None:
    """What a decorator says of a function."""
    declaration = getattr(candidate, _MARK, None)
    return declaration if isinstance(declaration, FunctionDeclaration) else None


def built(function: Callable[..., Any], **args: Any) -> Operator:
    """The operator that a decorated function is, with these arguments; for tests of it."""
    declaration = declaration_of(function)
    if declaration is None:
        raise OperatorError(f"{function!r} has no decorator `filter` or `mapper`")
    return declaration.build(checked_arguments(declaration.name, function, args, positional=1))


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
        is_async = inspect.iscoroutinefunction(function)
        if is_async and first != "row":
            raise OperatorError(
                f"{function.__name__!r} is async and takes a table; call its first parameter `row`: "
                "many rows are asked about at the same time"
            )
        limits = sorted(declared.keys() & {"max_in_flight", "row_timeout"})
        if limits and not is_async:
            raise OperatorError(f"{function.__name__!r} declares {limits[0]!r} and is not async")
        declaration = FunctionDeclaration(function, kind, tuple(reads), tuple(writes), reason, declared)
        setattr(function, _MARK, declaration)
        return function

    return decorate


def _as_bools(name: str, result: Any) -> Bools:
    array = (
        result.to_numpy(zero_copy_only=False) if isinstance(result, pa.Array | pa.ChunkedArray) else result
    )
    keep = np.asarray(array)
    if keep.shape == (0,):  # numpy makes floats of no rows
        keep = keep.astype(np.bool_)
    if keep.dtype != np.bool_ or keep.ndim != 1:
        example = next((each for each in np.atleast_1d(keep).tolist() if not isinstance(each, bool)), result)
        raise OperatorError(f"{name!r} returned {example!r}; a filter returns True or False for each row")
    return keep
