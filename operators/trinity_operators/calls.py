"""A chain of operators as the calls that it consists of.

What makes the calls decides where they run; what the operators return goes back to `operator_calls` in
`runner.py`. Here they run one after another, in process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import pyarrow as pa

from trinity_data.errors import OperatorError
from trinity_operators.base import Expander, Expansion, Filter, FilterResult, Mapper, MapperResult, Operator
from trinity_operators.task_engines import RolloutOperator

_T = TypeVar("_T")
Watch: TypeAlias = Callable[[str], None]
Output: TypeAlias = FilterResult | MapperResult | Expansion


def output_of(operator: Operator, rows: pa.Table) -> Output:
    """What the operator returns for rows."""
    if isinstance(operator, Filter):
        return operator.apply(rows)
    if isinstance(operator, Mapper):
        result = operator.map(rows)
        return result if isinstance(result, MapperResult) else MapperResult(result)
    if isinstance(operator, Expander):
        return operator.expand(rows)
    raise OperatorError(f"{operator.label!r} is neither a Filter nor a Mapper nor an Expander")


class LocatedError(OperatorError):
    """Says itself at which operator and at which rows."""


class StoppedOperatorError(LocatedError):
    """An operator can be called no more: the run ends, whatever rate of errors it may have."""


@dataclass(frozen=True)
class Call:
    """An operator that is to be called with rows, of which there is at least one."""

    operator: Operator
    position: int
    rows: pa.Table
    id_column: str

    def __call__(self) -> Output:
        """What the operator returns."""
        return output_of(self.operator, self.rows)

    def describe(self) -> str:
        """For messages: the operator, the number of rows and the first of them."""
        first, count = self.rows[self.id_column][0].as_py(), self.rows.num_rows
        return (
            f"operators[{self.position}]: {self.operator.label!r}, at {count} rows, "
            f"the first of them {first!r}"
        )


class OperatorElsewhere(Operator, ABC):
    """An operator of which each call is made in another process, which ends when it takes too long."""

    @abstractmethod
    async def output(self, call: Call) -> Output:
        """What the operator returns. Raises StoppedOperatorError where no process of it is left."""


Calls: TypeAlias = Generator[Call, Output, _T]
"""Each call is sent what its operator returned, or thrown what it raised."""


def run_calls(calls: Calls[_T], watch: Watch | None = None) -> _T:
    """What the calls come to, made one after another.

    `watch` is called with a description before each: an operator may never return.
    """
    try:
        call = next(calls)
        while True:
            if watch is not None:
                # rollouts have deadlines of their own, and come after the engines have started
                watch("" if isinstance(call.operator, RolloutOperator) else call.describe())
            try:
                output = call()
            # the boundary to code of other people: the chain names the operator, whatever it raises,
            # sys.exit included
            except (Exception, SystemExit) as error:
                call = calls.throw(error)
            else:
                call = calls.send(output)
    except StopIteration as end:
        result: _T = end.value
        return result
