"""Operators that wait for something else: for a model, a service, or a worker of their own.

They run in an event loop that all of them share, in a thread beside the run's; other code calls them like any
operator and waits.
"""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from trinity_data.errors import OperatorError
from trinity_operators.base import Filter, FilterResult, Mapper, MapperResult, Operator
from trinity_operators.checks import written_columns
from trinity_operators.row_answer import RowAnswer, added_totals, as_answer, total_of

_T = TypeVar("_T")
Row: TypeAlias = Mapping[str, Any]
"""What a row operator gets: the columns that it reads."""


class AsyncOperator(Operator):
    """Shared by those whose calls wait; the calls of several groups may wait at the same time."""

    pure = False
    calls_model = True

    @abstractmethod
    async def output(self, rows: pa.Table) -> FilterResult | MapperResult:
        """What the operator returns for the table; cancelled where it takes too long."""

    async def start(self) -> None:
        """As `prepare`, in the loop of the calls: opens connections, and asks once for an answer."""

    async def stop(self) -> None:
        """As `close`."""

    def prepare(self) -> None:
        in_operator_loop(self.start()).result()

    def close(self) -> None:
        in_operator_loop(self.stop()).result()


class RowOperator(AsyncOperator):
    """Shared by those that wait for an answer about each row."""

    max_in_flight: int = 64
    """Rows that are asked about at the same time."""
    row_timeout: float = 120.0
    """Seconds for one row, repetitions included; after that the row has an error."""
    _slots: asyncio.Semaphore | None = None

    async def answers(
        self, ask: Callable[[Row], Coroutine[Any, Any, Any]], rows: pa.Table
    ) -> tuple[list[RowAnswer | None], list[str]]:
        """What `ask` returns for each row, and why there is nothing, "" where there is."""
        # of all calls together; made here because it belongs to the loop
        slots = self._slots = self._slots or asyncio.Semaphore(self.max_in_flight)

        async def one(row: Row) -> tuple[RowAnswer | None, str]:
            async with slots:
                try:
                    async with asyncio.timeout(self.row_timeout) as deadline:
                        answer = await ask(row)
                # the boundary to code of other people, and to servers: the row has the error
                except Exception as error:
                    if deadline.expired():
                        return None, f"no answer within row_timeout, {self.row_timeout:g} s"
                    return None, f"{type(error).__name__}: {error}"
            return as_answer(answer), ""

        columns = rows.select(list(self.reads)) if self.reads else rows
        results: list[tuple[RowAnswer | None, str]] = [(None, "")] * rows.num_rows
        waiting = enumerate(columns.to_pylist(maps_as_pydicts="lossy"))

        async def work() -> None:
            for number, row in waiting:
                results[number] = await one(row)

        # a task of asyncio for each row would cost a third of what a request does
        await asyncio.gather(*(work() for _ in range(min(self.max_in_flight, rows.num_rows))))
        return [answer for answer, _ in results], [error for _, error in results]


class AsyncFilter(RowOperator, Filter):
    """A filter that waits for an answer about each row."""

    default_reason = "no"
    """Why rows are dropped that have no reason of their own."""

    @abstractmethod
    async def keeps(self, row: Row) -> bool | RowAnswer:
        """Whether the row is kept; what it raises is the row's error."""

    def apply(self, rows: pa.Table) -> FilterResult:
        return in_operator_loop(self.output(rows)).result()

    async def output(self, rows: pa.Table) -> FilterResult:
        with added_totals() as added:
            answers, errors = await self.answers(self.keeps, rows)
        for answer in answers:
            if answer is not None and not isinstance(answer.value, bool | np.bool_):
                raise OperatorError(
                    f"{self.name!r} returned {answer.value!r}; a filter returns True or False"
                )
        return FilterResult(
            np.array([answer is not None and bool(answer.value) for answer in answers], dtype=np.bool_),
            [answer.reason or self.default_reason if answer is not None else "" for answer in answers],
            totals=total_of(answers, added),
            errors=errors,
        )


class AsyncMapper(RowOperator, Mapper):
    """A mapper that waits for an answer about each row."""

    @abstractmethod
    async def map_row(self, row: Row) -> Any:
        """The columns that it writes as a dict, the value of the only one, or a `RowAnswer`; what it raises
        is the row's error.
        """

    def map(self, rows: pa.Table) -> MapperResult:
        return in_operator_loop(self.output(rows)).result()

    async def output(self, rows: pa.Table) -> MapperResult:
        with added_totals() as added:
            answers, errors = await self.answers(self.map_row, rows)
        values = [answer and answer.value for answer in answers]
        present = [value for value, answer in zip(values, answers, strict=True) if answer is not None]
        columns = written_columns(self, present)
        positions = [number for number, answer in enumerate(answers) if answer is not None]
        return MapperResult(
            {name: _spread(column, positions, rows, name) for name, column in columns.items()},
            reason=[answer.reason if answer is not None else "" for answer in answers],
            totals=total_of(answers, added),
            errors=errors,
        )


def in_operator_loop(work: Coroutine[Any, Any, _T]) -> Future[_T]:
    """Runs it in the loop that asynchronous operators share; not to be waited for in that loop."""
    return asyncio.run_coroutine_threadsafe(work, _operator_loop())


def _spread(column: Sequence[Any], positions: Sequence[int], rows: pa.Table, name: str) -> list[Any]:
    """The values at their rows; where there is none, a value of the same type that is not used."""
    place = rows.schema.get_field_index(name)
    is_text = place >= 0 and not pa.types.is_floating(rows.schema.field(place).type)
    spread: list[Any] = ["" if is_text else float("nan")] * rows.num_rows
    for position, value in zip(positions, column, strict=True):
        spread[position] = value
    return spread


@lru_cache(maxsize=1)
def _operator_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    without_end = loop.create_future()
    threading.Thread(
        target=loop.run_until_complete, args=(without_end,), name="asynchronous operators", daemon=True
    ).start()
    return loop
