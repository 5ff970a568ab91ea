"""The judging of `whatif` spread over the workers of Ray Data, for runs of many rollouts.

A worker judges a range of steps. It opens the store itself, so that only outcomes travel.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from trinity_data.config import StageConfig
from trinity_data.errors import OperatorError, StoreError, TrinityError
from trinity_data.launch.whatif import RerunStep, operators_of, rerun_operators
from trinity_operators.task_pipeline import from_bytes, to_bytes

TABLES = ("outcomes", "decisions", "operators")
# of one piece of work: enough to make up for opening the store
STEPS_A_RANGE = 16


class StepRange:
    """What runs in a worker. An error travels as data, since Ray would bury it in its own."""

    def __init__(self, run: Path, stage: StageConfig, base_dir: Path, allowed: Collection[str]) -> None:
        self.run, self.stage, self.base_dir, self.allowed = run, stage, base_dir, allowed

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        operators = operators_of(self.stage, self.base_dir, allowed=self.allowed)
        bounds = (row["first"], row["last"])
        try:
            judged = list(rerun_operators(self.run, operators, self.stage.stage_name, bounds))
        except TrinityError as error:
            return row | {"error": str(error), "judged": []}
        packed = [
            {"step": one.step} | {name: to_bytes(getattr(one, name)) for name in TABLES} for one in judged
        ]
        return row | {"error": "", "judged": packed}


def rerun_spread(
    run: Path, stage: StageConfig, base_dir: Path, steps: list[int], *, allowed: Collection[str] = ()
) -> Iterator[RerunStep]:
    """The same as `rerun_operators`, in the order of the steps. Ray must be running."""
    import ray.data

    stateful = [each.label for each in operators_of(stage, base_dir, allowed=allowed) if each.keeps_state]
    if stateful:
        raise OperatorError(f"{stateful[0]!r} keeps state, so the steps cannot be judged beside each other")
    starts = range(0, len(steps), STEPS_A_RANGE)
    ranges = [{"first": steps[i], "last": steps[min(i + STEPS_A_RANGE, len(steps)) - 1]} for i in starts]
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    work = ray.data.from_items(ranges, override_num_blocks=len(ranges))
    found = work.map(StepRange(run, stage, base_dir, tuple(allowed))).take_all()
    for row in sorted(found, key=lambda row: int(row["first"])):
        if row["error"]:
            raise StoreError(row["error"])
        for one in row["judged"]:
            yield RerunStep(int(one["step"]), *(from_bytes(one[name]) for name in TABLES))
