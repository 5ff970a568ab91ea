"""How a run is stopped: by Ctrl-C or SIGTERM, and by a second one to hurry.

The first leaves time for a checkpoint, the second does not. A thread ends the process when neither leads
to its end in time, whatever code of the user's is doing.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine
from types import FrameType
from typing import Any

from trinity_data.processes import kill_descendants

log = logging.getLogger(__name__)

EXIT_CODE = 130
STOPPED = "stopped; the same command goes on from here"
SIGNALS = (signal.SIGINT, signal.SIGTERM)
# for engines, Ray and the store to close; what is not closed by then is as safe as after a kill
CLOSING_SECONDS = 8.0


class Shutdown:
    """The signals that a run has got. One a process."""

    def __init__(self, *, closing_seconds: float = CLOSING_SECONDS) -> None:
        self.closing_seconds = closing_seconds
        self.times = 0
        """How many signals came."""
        self.installed = False
        self._is_over = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._deadline = float("inf")

    def install(self) -> None:
        """Both signals come here until the process ends.

        To be called again when a library has put its own in place.
        """
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        if not self.installed:
            # while the interpreter ends, a signal would print a traceback, or kill
            atexit.register(_ignore_signals)
        self.installed = True

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` in an event loop of its own; raises KeyboardInterrupt when it was stopped."""
        try:
            asyncio.run(self._attached(work))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    async def bounded(self, work: Coroutine[Any, Any, None], seconds: float) -> bool:
        """Gives `work` so many seconds, fewer at a second signal; whether it came to its end.

        Raises what it raises.
        """
        self._may_take(seconds)
        doing, hurry = asyncio.ensure_future(work), asyncio.ensure_future(self._hurry.wait())
        try:
            await asyncio.wait({doing, hurry}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hurry.cancel()
            self._may_take(0)
            if not doing.done():
                doing.cancel()
        if not doing.done():
            return False
        doing.result()
        return True

    def begin(self) -> None:
        """Stops the run as the first signal does; for a thread that gets the signal in its place."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._begin)

    def is_over(self) -> None:
        """The run has come to its end; a signal from now on ends the process at once."""
        self._is_over = True

    async def _attached(self, work: Coroutine[Any, Any, None]) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.ensure_future(work)
        if self.times:
            self._task.cancel()
        try:
            await self._task
        finally:
            self._loop = self._task = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.times += 1
        if self._is_over:
            _end_process()
        if self.times == 1:
            self._may_take(0)
            threading.Thread(target=self._end_in_time, name="stop", daemon=True).start()
            if self._loop is None:
                raise KeyboardInterrupt
            self._loop.call_soon_threadsafe(self._begin)
            return
        # cleaning up is never interrupted, only bounded
        self._deadline = min(self._deadline, time.monotonic() + self.closing_seconds)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._hurry.set)

    def _begin(self) -> None:
        log.warning("stopping: the trainer ends its step and writes a checkpoint; a second Ctrl-C skips that")
        if self._task is not None:
            self._task.cancel()

    def _may_take(self, seconds: float) -> None:
        """Sets when the process is ended: after `seconds` for the work under way, and then for closing."""
        if self.times == 1:
            self._deadline = time.monotonic() + seconds + self.closing_seconds

    def _end_in_time(self) -> None:
        while time.monotonic() < self._deadline:
            time.sleep(0.1)
        _end_process()


def _end_process() -> None:
    """At once, with the processes that were started, and with the one line that every stop has."""
    print(STOPPED, file=sys.stderr, flush=True)
    kill_descendants(os.getpid())
    os._exit(EXIT_CODE)


def _ignore_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
