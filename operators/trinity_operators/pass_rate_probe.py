"""How often the model solves each task before it is trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa
from pydantic import Field

from trinity_data.dataset.task import tasks_from_rows
from trinity_data.errors import OperatorError
from trinity_data.runs import resolve_runs
from trinity_operators.base import Filter, FilterResult
from trinity_operators.filters import check_bounds
from trinity_operators.runner import ERROR_REASON
from trinity_operators.task_engines import RolloutOperator, TriedTask


class PassRateProbe(RolloutOperator, Filter):
    """Keeps tasks of which the model passes a share of `rollouts` that lies in [`min_rate`, `max_rate`].

    A rollout passes with a raw reward above `pass_above`. The rollouts are made before the first step, and of
    a queue as its tasks come; those that `runs` have on record, of the same model asked in the same way, are
    not made again. Without `runs` they are the runs of the engines' project. A task all of whose rollouts
    fail has an error.
    """

    name = "pass_rate_probe"
    reads = ("prompt", "messages", "answer", "workflow", "reward_fn", "columns")
    writes = ("pass_rate", "difficulty")

    def __init__(
        self,
        rollouts: Annotated[int, Field(gt=0)] = 8,
        min_rate: Annotated[float, Field(ge=0, le=1)] = 0.0,
        max_rate: Annotated[float, Field(ge=0, le=1)] = 1.0,
        pass_above: float = 0.5,
        runs: Sequence[str] | None = None,
    ) -> None:
        check_bounds(min_rate, max_rate)
        self.num_rollouts, self.pass_above = rollouts, pass_above
        self.min_rate, self.max_rate = min_rate, max_rate
        self.runs = runs
        self._folders: list[Path] | None = None

    def prepare(self) -> None:
        super().prepare()
        self._folders = None if self.runs is None else resolve_runs(self.runs)

    def apply(self, rows: pa.Table) -> FilterResult:
        assert self.engines is not None and self.taskset is not None
        tried = self.engines.attempt(
            tasks_from_rows(rows, self.taskset.name),
            num_rollouts=self.num_rollouts,
            pass_above=self.pass_above,
            runs=self._folders,
        )
        rates = np.array([self._rate(each) for each in tried])
        has_rate = ~np.isnan(rates)
        # the few tasks of a push say little about those to come
        if not has_rate.any() and self.taskset.storage_type != "queue":
            raise OperatorError(
                f"every rollout of all {len(tried)} tasks failed, the first with: {tried[0].error}"
            )
        low, high = rates < self.min_rate, rates > self.max_rate
        reasons = [
            f"pass rate below {self.min_rate:g}" if is_low
            else f"pass rate above {self.max_rate:g}" if is_high
            else f"{ERROR_REASON}{each.error}" if not each.rewards
            else ""
            for each, is_low, is_high in zip(tried, low.tolist(), high.tolist(), strict=True)
        ]  # fmt: skip
        totals = {
            "requests": float(sum(each.requests for each in tried)),
            "tokens": float(sum(each.tokens for each in tried)),
            "rollouts": float(sum(each.num_rollouts for each in tried)),
            "tasks_on_record": float(sum(not each.num_rollouts for each in tried)),
            "tasks_without_rate": float((~has_rate).sum()),
        }
        return FilterResult(
            has_rate & ~low & ~high, reasons, rates,
            {"pass_rate": rates, "difficulty": 1.0 - rates}, totals=totals,
        )  # fmt: skip

    def _rate(self, task: TriedTask) -> float:
        """NaN where every rollout failed."""
        passes = [reward > self.pass_above for reward in task.rewards]
        return sum(passes) / len(passes) if passes else float("nan")
