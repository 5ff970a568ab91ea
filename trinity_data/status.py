"""What a run is doing right now, for the live view and the log.

Written by the loops, read by the live view.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

LAST_STEPS = 10
"""Over how many steps the live view says what rollouts yield."""


@dataclass
class OperatorRows:
    rows_in: int = 0
    rows_out: int = 0
    dropped: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=LAST_STEPS))
    """Rows and their response tokens, of the last steps; nothing of a task operator."""


@dataclass(frozen=True)
class Yield:
    """What rollouts cost, and what training got of them."""

    rollout_tokens: int = 0
    """Response tokens, those of failed attempts too."""
    dropped_tokens: int = 0
    """Of the rows that operators dropped."""
    signal: float = 0.0
    """Σ |advantage| × response tokens × (1 − clipped share) over the rows that were trained."""
    failed_tokens: int = 0
    """Of `rollout_tokens` those of attempts that failed."""

    @property
    def tokens_per_signal(self) -> float | None:
        """None where there is no signal."""
        return self.rollout_tokens / self.signal if self.signal > 0 else None

    def metrics(self) -> dict[str, float]:
        """For `steps.metrics`."""
        price = {} if self.tokens_per_signal is None else {"yield/tokens_per_signal": self.tokens_per_signal}
        failed = {"yield/failed_tokens": float(self.failed_tokens)} if self.failed_tokens else {}
        return (
            {
                "yield/rollout_tokens": float(self.rollout_tokens),
                "yield/dropped_tokens": float(self.dropped_tokens),
                "yield/signal": self.signal,
            }
            | failed
            | price
        )


def total_yield(steps: Iterable[Yield]) -> Yield:
    """Of several steps together."""
    each = list(steps)
    return Yield(
        sum(step.rollout_tokens for step in each),
        sum(step.dropped_tokens for step in each),
        sum(step.signal for step in each),
        sum(step.failed_tokens for step in each),
    )


@dataclass
class Mean:
    """Of numbers as they come."""

    total: float = 0.0
    number: int = 0

    def add(self, value: float) -> None:
        self.total, self.number = self.total + value, self.number + 1

    @property
    def value(self) -> float | None:
        return self.total / self.number if self.number else None


@dataclass(frozen=True)
class Role:
    """A part of the run as it is now."""

    where: str
    """Its process and node."""
    version: int | None = None
    """Of the model that it has; None where it has none, or that is not known here."""
    queue: str = ""
    """What it has before it."""


@dataclass
class Status:
    """One run's state. Everything here is also in the store; this is the part worth watching."""

    run: str
    stage: str = ""
    activity: str = "starting"
    waits: Mapping[str, str] = field(default_factory=dict)
    """What explorer and trainer wait for now, where one does: `Synchronizer.waits`."""
    step: int = 0
    last_step: int | None = None
    steps_done: int = 0
    """Of the stage, in this session: those before a restart took their time elsewhere."""
    trained_version: int = 0
    engine_version: int = 0
    reward: float | None = None
    """Raw, mean over the rollouts of the last batch."""
    shaped_reward: float | None = None
    """The same after the operators; None where it has none."""
    accuracy: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation, by task set."""
    tokens_per_second: float = 0.0
    """Generated in the last step that was explored, over all the time it took."""
    rollouts_done: int = 0
    """Of the step that is explored; so are the next."""
    rollouts_total: int = 0
    rollouts_failed: int = 0
    last_error: str = ""
    explored_reward: Mean = field(default_factory=Mean)
    explored_accuracy: Mean = field(default_factory=Mean)
    operators: dict[str, OperatorRows] = field(default_factory=dict)
    roles: dict[str, Callable[[], Role]] = field(default_factory=dict)
    """By name, each to be asked whenever it is shown; processes elsewhere too."""
    restarts: dict[str, str] = field(default_factory=dict)
    """What was last said of each part that ended by itself, by its name."""
    yields: deque[Yield] = field(default_factory=lambda: deque(maxlen=LAST_STEPS))
    """Of the last steps that were trained in this session."""
    started: float = field(default_factory=time.monotonic)
    stage_started: float = field(default_factory=time.monotonic)

    def begin_stage(self, stage: str, *, first_step: int, last_step: int | None) -> None:
        self.stage, self.steps_done, self.last_step = stage, 0, last_step
        self.step, self.stage_started = first_step - 1, time.monotonic()
        self.operators = {}
        self.yields.clear()

    def begin_rollouts(self, total: int, *, activity: str = "exploring") -> None:
        """Of the next step, or of what else is tried."""
        self.activity, self.rollouts_done, self.rollouts_total = activity, 0, total
        self.rollouts_failed, self.last_error = 0, ""
        self.explored_reward, self.explored_accuracy = Mean(), Mean()

    def count_rollout(self, *, error: str, reward: float | None, accuracy: float | None) -> None:
        """One rollout has ended; reward and accuracy where it has them."""
        self.rollouts_done += 1
        if error:
            self.rollouts_failed, self.last_error = self.rollouts_failed + 1, error
        if reward is not None:
            self.explored_reward.add(reward)
        if accuracy is not None:
            self.explored_accuracy.add(accuracy)

    def count_operator(
        self, name: str, rows_in: int, rows_out: int, *, dropped_tokens: int | None = None
    ) -> None:
        """`dropped_tokens` are of an experience operator in one step."""
        rows = self.operators.setdefault(name, OperatorRows())
        rows.rows_in += rows_in
        rows.rows_out += rows_out
        if dropped_tokens is not None:
            rows.dropped.append((rows_in - rows_out, dropped_tokens))

    def seconds_left(self) -> float | None:
        """Of this stage, at its rate so far; None when that cannot be said."""
        if self.last_step is None or not self.steps_done:
            return None
        return (time.monotonic() - self.stage_started) / self.steps_done * (self.last_step - self.step)
