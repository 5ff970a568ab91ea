"""Chains of operators of which some wait for a model or a worker, while the event loop goes on.

Each group passes through its chain by itself, so that many groups wait at the same time. Every call has a
deadline: one that waits is given up, and its rows have an error; one that computes in process cannot be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from trinity_operators.asynchronous import AsyncOperator, in_operator_loop
from trinity_operators.base import Operator
from trinity_operators.calls import (
    Call,
    Calls,
    OperatorElsewhere,
    Output,
    StoppedOperatorError,
    Watch,
)
from trinity_operators.registry import is_built_in
from trinity_operators.timeout import OperatorTimeoutError, in_time

_T = TypeVar("_T")


def leaves_the_loop(operator: Operator) -> bool:
    """Whether it waits for something else than this process, so that groups need not wait for each other."""
    waits = isinstance(operator, AsyncOperator | OperatorElsewhere)
    return waits or operator.calls_model or bool(operator.model)


class OffLoop:
    """Makes the calls of chains beside the event loop."""

    def __init__(self, operators: Sequence[Operator], *, timeout: float) -> None:
        """`timeout` in seconds for each call of an operator."""
        self.labels = [operator.label for operator in operators if leaves_the_loop(operator)]
        self.timeout = timeout
        # an operator that computes here need not bear two calls at the same time
        self._turn = asyncio.Lock()

    async def run(self, calls: Calls[_T]) -> _T:
        """What the calls come to.

        Raises OperatorTimeoutError where one that cannot be given up takes too long, and
        StoppedOperatorError.
        """
        try:
            call = next(calls)
            while True:
                try:
                    output = await self._output(call)
                # the boundary to code of other people: the chain names the operator, whatever it raises
                except (Exception, SystemExit) as error:
                    waited = isinstance(error, OperatorTimeoutError) and leaves_the_loop(call.operator)
                    if isinstance(error, OperatorTimeoutError | StoppedOperatorError) and not waited:
                        raise
                    call = calls.throw(error)
                else:
                    call = calls.send(output)
        except StopIteration as end:
            result: _T = end.value
            return result

    async def _output(self, call: Call) -> Output:
        operator = call.operator
        if isinstance(operator, OperatorElsewhere):
            return await operator.output(call)
        if isinstance(operator, AsyncOperator):
            answer = asyncio.wrap_future(in_operator_loop(operator.output(call.rows)))
            try:
                async with asyncio.timeout(self.timeout) as deadline:
                    return await answer
            except TimeoutError as error:
                if not deadline.expired():
                    raise
                raise OperatorTimeoutError(call.describe(), self.timeout) from error
        if not leaves_the_loop(operator) and is_built_in(operator):
            return call()

        def work(watch: Watch) -> Output:
            watch(call.describe())
            return call()

        if leaves_the_loop(operator):
            return await in_time(work, self.timeout)
        async with self._turn:
            return await in_time(work, self.timeout)
