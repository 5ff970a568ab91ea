"""A limit on Python code that is not ours and runs in a thread of ours: a chat template that does not end.

It is interrupted between two of its instructions by an exception that `except Exception` does not catch. Code
that hangs outside of Python is not reached by it. One thread watches all limits, since a thread for each
costs more than most of what is limited.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

WATCH_SECONDS = 0.1


class _Interrupt(BaseException):
    """Raised in the thread that is late."""


class _Limit:
    """Of one block in one thread."""

    def __init__(self, seconds: float) -> None:
        self.thread, self.at = threading.get_ident(), time.monotonic() + seconds
        self.lock = threading.Lock()
        self.over = self.late = False

    def end(self) -> None:
        """After this it interrupts nothing."""
        with self.lock:
            self.over = True
        _limits.discard(self)

    def interrupt(self) -> None:
        """Does nothing while the block is just ending."""
        if self.lock.acquire(blocking=False):
            try:
                if not self.over and not self.late:
                    self.late = True
                    _raise_in(self.thread, _Interrupt)
            finally:
                self.lock.release()


_limits: set[_Limit] = set()
_watcher: threading.Thread | None = None


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises a TimeoutError where the block takes longer, in whatever thread it runs."""
    limit = _Limit(seconds)
    _limits.add(limit)
    # a process that was forked off has none
    global _watcher
    if _watcher is None or not _watcher.is_alive():
        _watcher = threading.Thread(target=_watch, name="time limits", daemon=True)
        _watcher.start()
    try:
        try:
            yield
        finally:
            limit.end()
            if limit.late:
                # it may have ended just before the interrupt came, which must not come later
                _raise_in(limit.thread, None)
    except _Interrupt:
        pass
    if limit.late:
        raise TimeoutError(f"no end after {seconds:g} s")


def _watch() -> None:
    while True:
        time.sleep(WATCH_SECONDS)
        now = time.monotonic()
        for limit in tuple(_limits):
            if limit.at <= now:
                limit.interrupt()


def _raise_in(thread: int, exception: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if exception is None else ctypes.py_object(exception)
    )
