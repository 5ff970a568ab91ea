"""How long a rollout may take, from the times of those before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.config import DynamicTimeoutConfig, ExplorerConfig
from trinity_data.schema import rollout_of
from trinity_data.store.protocol import ReadableStore
from trinity_explorer.rollout_deadline import NO_END


class TimeLimit(NamedTuple):
    """Of one rollout with all its retries."""

    seconds: float
    why: str = ""
    """Where it is not `explorer.max_timeout`."""


class DynamicTimeout:
    """`ratio` × the mean of the rollouts of the steps that are over, and never above `max_timeout`.

    A rollout that reached its limit counts with the time that it had; one that failed otherwise does not
    count.
    """

    def __init__(self, explorer: ExplorerConfig) -> None:
        self.config: DynamicTimeoutConfig = explorer.dynamic_timeout
        self.limit = self._longest = TimeLimit(explorer.max_timeout)
        self._seconds, self._number, self._num_steps = 0.0, 0, 0

    def count(self, row: Mapping[str, Any]) -> None:
        """The last row of a rollout that has ended."""
        if not row["error"] or row["error"].startswith(NO_END):
            self._seconds, self._number = self._seconds + row["seconds"], self._number + 1

    def finish_step(self) -> None:
        """The rollouts of the next step have the limit that those until now give."""
        self._num_steps += 1
        config = self.config
        if not config.enable or self._num_steps < config.warmup_min_steps or not self._number:
            return
        mean = self._seconds / self._number
        if config.ratio * mean < self._longest.seconds:
            why = f"{config.ratio:g} × the mean of {self._number} rollouts, {mean:.3g} s; dynamic_timeout"
            self.limit = TimeLimit(config.ratio * mean, why)
        else:
            self.limit = self._longest

    def resume(
        self, store: ReadableStore, stage: str, explorer: str, *, first_step: int, last_step: int
    ) -> None:
        """Counts the newest steps that earlier sessions have explored, as many as the warm-up takes."""
        if not self.config.enable:
            return
        first = max(first_step, last_step - max(self.config.warmup_min_steps, 1) + 1)
        columns = ("experience_id", "seconds", "error")
        rows = store.of_steps("experiences", stage, first, last_step, columns=columns)
        mine: pa.Table = rows.filter(pc.starts_with(rows["experience_id"], f"{explorer}/"))
        for row in {rollout_of(row["experience_id"]): row for row in mine.to_pylist()}.values():
            self.count(row)
        for _ in range(first_step, last_step + 1):
            self.finish_step()
