"""When a run stops because nothing came of its rollouts.

Counts are read from the store, so that they hold over a restart.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from trinity_data.config import ExplorerConfig
from trinity_data.errors import NothingLearntError
from trinity_data.reporter import Reporter, RolloutCounts, count_rollouts
from trinity_data.store.protocol import WritableStore
from trinity_data.store.types import State
from trinity_operators.experience_pipeline import ExperiencePipeline

log = logging.getLogger(__name__)

MAX_ERROR_CHARACTERS = 300


@dataclass(frozen=True)
class CommonestError:
    """The error that most of some failed rollouts had, but for the numbers in it."""

    text: str
    times: int
    example: int
    """Which of the rollouts had it first."""


def commonest_error(errors: Sequence[str]) -> CommonestError:
    """Of at least one error; each counts by its first line."""
    shapes = [re.sub(r"\d+", "#", _first_line(error)) for error in errors]
    shape, times = Counter(shapes).most_common(1)[0]
    example = shapes.index(shape)
    return CommonestError(_first_line(errors[example]), times, example)


class FailureWatch:
    """Looks at each step when it is over, and stops the run after several in a row that came to nothing."""

    def __init__(self, config: ExplorerConfig, store: WritableStore, reporter: Reporter) -> None:
        self.store, self.reporter, self.stage = store, reporter, reporter.stage.stage_name
        self.max_failed_steps, self.max_dropped_steps = config.max_failed_steps, config.max_dropped_steps
        self.failed_steps = 0
        self.dropped_steps = 0

    def counts(self, step: int) -> RolloutCounts:
        """Of this explorer, so far."""
        return count_rollouts(self.reporter.states_of(step))

    async def check(self, step: int, pipeline: ExperiencePipeline) -> None:
        """Logs an event where a step came to nothing; NothingLearntError at the last that may.

        `pipeline` has the counts of the step.
        """
        states = [] if pipeline.kept_groups.get(step) else self.reporter.states_of(step)
        counts = count_rollouts(states)
        if not counts.came_to_nothing:
            self.failed_steps = self.dropped_steps = 0
        elif counts.all_failed:
            self.failed_steps += 1
            rows = [row for row, _ in states]
            errors = self.store.read(rows, columns=["error"])["error"].to_pylist()
            commonest = commonest_error([str(error) for error in errors])
            message = (
                f"all {len(rows)} rollouts failed, {commonest.times} with: {commonest.text}; "
                f"{self._command(rows[commonest.example])}"
            )
            await self._warn(step, "all_failed", message)
            if self.failed_steps >= self.max_failed_steps:
                key = f"max_failed_steps: {self.max_failed_steps}"
                raise self._error(step, message, "fix its cause", key)
        else:
            self.failed_steps, self.dropped_steps = 0, self.dropped_steps + 1
            dropped = [row for row, state in states if state is State.DROPPED]
            by_operator = {each.operator: each.rows_in - each.rows_out for each in pipeline.counts(step)}
            untrainable = len(dropped) - sum(by_operator.values())
            parts = [f"{name} dropped {number}" for name, number in by_operator.items() if number]
            parts += [f"{untrainable} could not be trained"] if untrainable > 0 else []
            message = (
                f"nothing is left of {counts.number} rollouts: {counts.failed} failed, "
                f"{counts.dropped} were dropped (of their rows {', '.join(parts)}); "
                f"{self._command(dropped[0])}"
            )
            await self._warn(step, "all_dropped", message)
            if self.max_dropped_steps is not None and self.dropped_steps >= self.max_dropped_steps:
                key = f"max_dropped_steps: {self.max_dropped_steps}"
                raise self._error(step, message, "change the operators or the tasks", key)

    def _command(self, row: str) -> str:
        return f"`trinity-data why {self.store.root.parent} {row}` shows one"

    async def _warn(self, step: int, kind: str, message: str) -> None:
        log.warning("stage %s, step %d: %s", self.stage, step, message)
        await asyncio.wrap_future(self.store.log_event(self.stage, step, kind, message))

    def _error(self, step: int, message: str, todo: str, key: str) -> NothingLearntError:
        return NothingLearntError(
            f"stage {self.stage}, step {step}: {message}; {todo} and run the same command again, "
            f"which goes on with the next step (explorer.{key})"
        )


def _first_line(error: str) -> str:
    line = next(iter(error.strip().splitlines()), "an error without a text")
    return line if len(line) <= MAX_ERROR_CHARACTERS else f"{line[:MAX_ERROR_CHARACTERS]}…"
