"""What a run is doing right now, for the live view and the log. Written by the loops, read by whoever shows it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class OperatorRows:
    rows_in: int = 0
    rows_out: int = 0


@dataclass
class Status:
    """One run's state. Everything here is also in the store; this is the part worth watching."""

    run: str
    stage: str = ""
    activity: str = "starting"
    waits_for: str = ""
    """What keeps the explorer from beginning its next step; empty while nothing does."""
    step: int = 0
    last_step: int | None = None
    steps_done: int = 0
    """Of the stage, in this session: those before a restart took their time elsewhere."""
    trained_version: int = 0
    engine_version: int = 0
    reward: float | None = None
    accuracy: dict[str, float] = field(default_factory=dict)
    tokens_per_second: float = 0.0
    rollouts_done: int = 0
    rollouts_total: int = 0
    operators: dict[str, OperatorRows] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    stage_started: float = field(default_factory=time.monotonic)

    def begin_stage(self, stage: str, *, first_step: int, last_step: int | None) -> None:
        self.stage, self.steps_done, self.last_step = stage, 0, last_step
        self.step, self.stage_started = first_step - 1, time.monotonic()
        self.operators = {}

    def count_operator(self, name: str, rows_in: int, rows_out: int) -> None:
        rows = self.operators.setdefault(name, OperatorRows())
        rows.rows_in += rows_in
        rows.rows_out += rows_out

    def seconds_left(self) -> float | None:
        """Of this stage, at the pace it has had so far; None when that cannot be said."""
        if self.last_step is None or not self.steps_done:
            return None
        return (time.monotonic() - self.stage_started) / self.steps_done * (self.last_step - self.step)
