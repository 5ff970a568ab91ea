"""A limit on Python code that is not ours and runs in a thread of ours: a chat template that does not end.

It is interrupted between two of its instructions by an exception that `except Exception` does not catch. Code that
hangs outside of Python is not reached by it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Interrupt(BaseException):
    """Raised in the thread that is late."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raises a TimeoutError where the block takes longer, in whatever thread it runs."""
    thread, lock = threading.get_ident(), threading.Lock()
    over = late = False

    def interrupt() -> None:
        nonlocal late
        with lock:
            if not over:
                late = True
                _raise_in(thread, _Interrupt)

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        try:
            yield
        finally:
            with lock:
                over = True
            timer.cancel()
            if late:
                # it may have ended just before the interrupt came, which must not come later
                _raise_in(thread, None)
    except _Interrupt:
        pass
    if late:
        raise TimeoutError(f"no end after {seconds:g} s")


def _raise_in(thread: int, exception: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if exception is None else ctypes.py_object(exception)
    )
