"""Operators in a thread of their own and under a deadline, so that the event loop goes on whatever they do.

A thread cannot be ended: one whose operator hangs is left behind, and ends with the process.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from trinity_operators.calls import LocatedError, Watch

_T = TypeVar("_T")


class OperatorTimeoutError(LocatedError):
    """An operator was given up."""

    def __init__(self, what: str, seconds: float) -> None:
        """`what` names the operator and its rows."""
        super().__init__(f"{what}, did not end within `operator_timeout`, {seconds:g} s")


async def in_time(work: Callable[[Watch], _T], seconds: float) -> _T:
    """What `work` returns or raises.

    Raises OperatorTimeoutError when an operator, which `work` reports to its watch, takes longer than that.
    """
    last_report, result = [("", time.monotonic())], Future[_T]()

    def watch(what: str) -> None:
        last_report[0] = (what, time.monotonic())

    def run() -> None:
        try:
            result.set_result(work(watch))
        except BaseException as error:  # the boundary of the thread: the waiting task gets it
            result.set_exception(error)

    threading.Thread(target=run, name="operators", daemon=True).start()
    done = asyncio.wrap_future(result)
    while not done.done():
        what, since = last_report[0]
        seconds_left = since + seconds - time.monotonic()
        if seconds_left <= 0 and what:
            raise OperatorTimeoutError(what, seconds)
        await asyncio.wait({done}, timeout=seconds_left if seconds_left > 0 else seconds)
    return done.result()
