"""How often what ended by itself is started again, such as an engine or the trainer's ranks."""

from __future__ import annotations

import time
from collections.abc import Callable

HOUR = 3600.0
_LONGEST_DELAY = 60.0


class RestartLimit:
    """Of one part of a run."""

    def __init__(self, max_per_hour: int, *, now: Callable[[], float] = time.monotonic) -> None:
        self.max_per_hour, self._now = max_per_hour, now
        self._starts: list[float] = []

    def next_delay(self) -> float | None:
        """Counts a restart; seconds to wait before it: 0, 1, 2, 4 up to 60, by the restarts within an hour.

        None, and nothing is counted, where there were `max_per_hour` within the last hour.
        """
        now = self._now()
        self._starts = [start for start in self._starts if now - start < HOUR]
        if len(self._starts) >= self.max_per_hour:
            return None
        self._starts.append(now)
        num_before = len(self._starts) - 1
        return min(2.0 ** (num_before - 1), _LONGEST_DELAY) if num_before else 0.0
