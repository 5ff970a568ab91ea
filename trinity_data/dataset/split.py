"""Which rows of a local data set a `split` names: `train`, `train[:10]`, `train[10%:20%]`, `train+test`,
as `datasets` reads it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trinity_data.errors import ConfigError

_PART = re.compile(
    r"(?P<name>[\w.-]+)(\[((?P<start>-?\d+)(?P<start_percent>%)?)?:((?P<stop>-?\d+)(?P<stop_percent>%)?)?\])?"
)


@dataclass(frozen=True)
class SplitPart:
    """One term of a split: consecutive rows of a named split."""

    name: str
    start: int | None = None
    stop: int | None = None
    percent: bool = False

    def bounds(self, num_rows: int) -> tuple[int, int]:
        """First row and the one behind the last, of `num_rows`; shares are rounded to the nearest row."""
        start = 0 if self.start is None else self._row(self.start, num_rows)
        stop = num_rows if self.stop is None else self._row(self.stop, num_rows)
        return start, max(start, stop)

    def _row(self, bound: int, num_rows: int) -> int:
        row = round(bound * num_rows / 100) if self.percent else bound
        return min(max(row + num_rows if row < 0 else row, 0), num_rows)


def split_parts(split: str) -> list[SplitPart]:
    """The terms of a split in order. Raises ConfigError for what is none."""
    return [_part(text.strip(), split) for text in split.split("+")]


def _part(text: str, split: str) -> SplitPart:
    found = _PART.fullmatch(text)
    allowed = "allowed: train, train[:100], train[10%:20%], train[:10]+train[-10:]"
    if found is None:
        raise ConfigError(f"found split {split!r}; {text!r} is no split; {allowed}")
    start, stop = (None if found[name] is None else int(found[name]) for name in ("start", "stop"))
    percent = bool(found["start_percent"] or found["stop_percent"])
    if percent and any(bound is not None and abs(bound) > 100 for bound in (start, stop)):
        raise ConfigError(f"found split {split!r}; a share is between -100% and 100%; {allowed}")
    return SplitPart(found["name"], start, stop, percent)
