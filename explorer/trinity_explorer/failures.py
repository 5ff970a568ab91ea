"""What became of the rollouts of a step, and when a run stops because nothing came of them.

Counts are read from the store, so that they hold over a restart.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from trinity_data.errors import NothingLearntError
from trinity_data.schema import rollout_of, rows_to_table
from trinity_data.store.store import Store
from trinity_data.store.types import Commit, State
from trinity_operators.runner import OperatorCount

log = logging.getLogger(__name__)

MAX_ERROR_CHARACTERS = 300


@dataclass(frozen=True)
class RolloutCounts:
    """The rollouts of a step: how many there are, and whose rows all failed or were all dropped."""

    number: int
    failed: int
    dropped: int

    @property
    def came_to_nothing(self) -> bool:
        return self.number > 0 and self.failed + self.dropped == self.number

    @property
    def all_failed(self) -> bool:
        return 0 < self.number == self.failed

    def metrics(self) -> dict[str, float]:
        """For `steps.metrics`."""
        return {
            "rollout/number": float(self.number),
            "rollout/failed": float(self.failed),
            "rollout/dropped": float(self.dropped),
        }


def count_tries(states: Iterable[tuple[str, State]]) -> RolloutCounts:
    """Of the rows of a step with their states.

    A rollout of which some turn was kept is neither failed nor dropped.
    """
    found, not_failed, alive = set[str](), set[str](), set[str]()
    for row, state in states:
        rollout = rollout_of(row)
        found.add(rollout)
        if state is not State.FAILED:
            not_failed.add(rollout)
            if state is not State.DROPPED:
                alive.add(rollout)
    return RolloutCounts(len(found), len(found) - len(not_failed), len(not_failed) - len(alive))


@dataclass(frozen=True)
class CommonestError:
    """The error that most of some failed tries had, but for the numbers in it."""

    text: str
    times: int
    example: int
    """Which of the tries had it first."""


def commonest_error(errors: Sequence[str]) -> CommonestError:
    """Of at least one error; each is told by its first line."""
    shapes = [re.sub(r"\d+", "#", _first_line(error)) for error in errors]
    shape, times = Counter(shapes).most_common(1)[0]
    example = shapes.index(shape)
    return CommonestError(_first_line(errors[example]), times, example)


class FailureWatch:
    """Looks at each step when it is over, and stops the run after so many in a row that came to nothing."""

    def __init__(
        self, store: Store, stage: str, *, explorer: str, max_failed_steps: int, max_dropped_steps: int | None
    ) -> None:
        self.store, self.stage, self.explorer = store, stage, explorer
        self.max_failed_steps, self.max_dropped_steps = max_failed_steps, max_dropped_steps
        self.failed_steps = 0
        self.dropped_steps = 0

    def tries(self, step: int) -> RolloutCounts:
        """Of this explorer, so far."""
        return count_tries(self._states(step))

    async def look_at(self, step: int, *, kept_groups: int, operators: Sequence[OperatorCount]) -> None:
        """Says in `events` that a step came to nothing; raises NothingLearntError at the last that may.

        `kept_groups` is of how many groups of the step rows were kept, `operators` are its counts.
        """
        if kept_groups:
            self.failed_steps = self.dropped_steps = 0
            return
        states = self._states(step)
        tries = count_tries(states)
        if not tries.came_to_nothing:
            self.failed_steps = self.dropped_steps = 0
        elif tries.all_failed:
            self.failed_steps += 1
            message = self._all_failed([row for row, _ in states])
            await self._say(step, "all_failed", message)
            if self.failed_steps >= self.max_failed_steps:
                raise self._stop(
                    step, message, "mend its cause", f"max_failed_steps: {self.max_failed_steps}"
                )
        else:
            self.failed_steps, self.dropped_steps = 0, self.dropped_steps + 1
            dropped = [row for row, state in states if state is State.DROPPED]
            message = self._nothing_left(tries, dropped, operators)
            await self._say(step, "all_dropped", message)
            if self.max_dropped_steps is not None and self.dropped_steps >= self.max_dropped_steps:
                key = f"max_dropped_steps: {self.max_dropped_steps}"
                raise self._stop(step, message, "change the operators or the tasks", key)

    def _states(self, step: int) -> list[tuple[str, State]]:
        found = self.store.group_progress(self.stage, step)
        return [(row, state) for row, state in found if row.startswith(f"{self.explorer}/")]

    def _all_failed(self, rows: Sequence[str]) -> str:
        errors = self.store.read(rows, columns=["error"])["error"].to_pylist()
        worst = commonest_error(errors)
        return (
            f"all {len(rows)} rollouts failed, {worst.times} with: {worst.text}; "
            f"{self._shown(rows[worst.example])}"
        )

    def _nothing_left(
        self, tries: RolloutCounts, dropped: Sequence[str], operators: Sequence[OperatorCount]
    ) -> str:
        by = {count.operator: count.rows_in - count.rows_out for count in operators}
        untrainable = len(dropped) - sum(by.values())
        said = [f"{name} dropped {number}" for name, number in by.items() if number]
        said += [f"{untrainable} could not be trained"] if untrainable > 0 else []
        return (
            f"nothing is left of {tries.number} rollouts: {tries.failed} failed, "
            f"{tries.dropped} were dropped (of their rows {', '.join(said)}); {self._shown(dropped[0])}"
        )

    def _shown(self, row: str) -> str:
        return f"`trinity-data why {self.store.root.parent} {row}` shows one"

    async def _say(self, step: int, kind: str, message: str) -> None:
        log.warning("stage %s, step %d: %s", self.stage, step, message)
        row: dict[str, object] = {
            "at": datetime.now(UTC),
            "stage": self.stage,
            "step": step,
            "kind": kind,
            "message": message,
        }
        await asyncio.wrap_future(
            self.store.submit(Commit(tables={"events": rows_to_table("events", [row])}))
        )

    def _stop(self, step: int, message: str, todo: str, key: str) -> NothingLearntError:
        return NothingLearntError(
            f"stage {self.stage}, step {step}: {message}; {todo} and run the same command again, "
            f"which goes on with the next step (explorer.{key})"
        )


def _first_line(error: str) -> str:
    line = next(iter(error.strip().splitlines()), "an error without a text")
    return line if len(line) <= MAX_ERROR_CHARACTERS else f"{line[:MAX_ERROR_CHARACTERS]}…"
