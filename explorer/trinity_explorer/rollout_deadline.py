"""The deadline of a rollout with all its retries.

One timer watches all rollouts of an event loop: a timer for each takes a sixth of a rollout's CPU time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from types import TracebackType
from weakref import WeakKeyDictionary

_LOOK_SECONDS = 0.05

NO_END = "no end after"
"""What the error of a rollout begins with whose time was over."""


class RolloutDeadline:
    """A context manager: what runs in it raises a TimeoutError when the time is over.

    May be entered again, with the time that is left.
    """

    def __init__(
        self, seconds: float, lost_seconds: Callable[[], float] = lambda: 0.0, *, why: str = ""
    ) -> None:
        """`lost_seconds` says how much was lost so far to what is no fault of any rollout;
        what is lost from now on does not count. `why` the time is not the one that is configured.
        """
        self.seconds, self.lost_seconds, self.why = seconds, lost_seconds, why
        self.restart()

    def __str__(self) -> str:
        return f"{self.seconds:.3g} s ({self.why})" if self.why else f"{self.seconds:g} s"

    def restart(self) -> None:
        """Gives the rollout all its time again."""
        # when to look whether the time is over
        self.at, self.expired = asyncio.get_running_loop().time() + self.seconds, False
        # but for what was lost so far
        self._end = self.at - self.lost_seconds()

    def is_over(self, now: float) -> bool:
        """Else there is another time to look."""
        end = self._end + self.lost_seconds()
        # not at once again: while something is lost, the end recedes as fast as the time passes
        self.at = max(end, now + _LOOK_SECONDS)
        return end <= now

    async def leave_out(self, ready: Callable[[], Awaitable[None]]) -> None:
        """Waits for `ready` with the clock stopped: what a rollout waits for without a fault of its own."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        await ready()
        waited = loop.time() - started
        self._end, self.at = self._end + waited, self.at + waited

    def expire(self) -> None:
        """Cancels what runs."""
        self.expired = True
        self._task.cancel()

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "a deadline is of a task"
        self._task, self._cancelling = task, task.cancelling()
        loop = asyncio.get_running_loop()
        self._timer = _TIMERS.get(loop) or _TIMERS.setdefault(loop, _Timer())
        self._timer.add(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.discard(self)
        # as in asyncio.Timeout: the cancellation was not ours alone if more are left
        ours = self.expired and self._task.uncancel() <= self._cancelling
        if ours and isinstance(error, asyncio.CancelledError):
            raise TimeoutError from error


class _Timer:
    """Set to the earliest deadline that was running when it was set."""

    def __init__(self) -> None:
        self._running: set[RolloutDeadline] = set()
        self._at = math.inf
        self._handle: asyncio.TimerHandle | None = None

    def add(self, deadline: RolloutDeadline) -> None:
        self._running.add(deadline)
        if deadline.at < self._at:
            self._set(deadline.at)

    def discard(self, deadline: RolloutDeadline) -> None:
        self._running.discard(deadline)
        if not self._running:
            self._set(math.inf)

    def _set(self, at: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._at = at
        self._handle = asyncio.get_running_loop().call_at(at, self._expire) if at < math.inf else None

    def _expire(self) -> None:
        now = asyncio.get_running_loop().time()
        for deadline in [each for each in self._running if each.at <= now and each.is_over(now)]:
            self._running.discard(deadline)
            deadline.expire()
        self._set(min((each.at for each in self._running), default=math.inf))


_TIMERS: WeakKeyDictionary[asyncio.AbstractEventLoop, _Timer] = WeakKeyDictionary()
