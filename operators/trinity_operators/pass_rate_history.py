"""How often the tasks were solved before, by what runs have on record.

A task is found again by its prompt and its answer, whatever its set is called and wherever it lies there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from trinity_data.errors import OperatorError
from trinity_data.runs import resolve_runs
from trinity_data.schema import values_of
from trinity_operators.base import Filter, FilterResult, Floats, choose_reason, text_column
from trinity_operators.filters import check_bounds, within

# solved, asked and groups of each task; of an evaluated task those of its newest evaluation
_QUERIES = {
    "rollouts": """
        SELECT prompt, answer, sum(s.pass_rate * s.rollouts) AS solved,
            sum(s.rollouts)::DOUBLE AS asked, sum(s.groups)::DOUBLE AS uses
        FROM task_stats s JOIN tasks USING (stage, task_id)
        WHERE s.rollouts > 0 AND s.stage IS DISTINCT FROM '{stage}' GROUP BY ALL
    """,
    "evals": """
        SELECT prompt, answer, sum(accuracy) AS solved, count(*) AS asked, 0 AS uses
        FROM (
            SELECT * FROM evals WHERE accuracy IS NOT NULL AND stage IS DISTINCT FROM '{stage}'
            QUALIFY step = max(step) OVER (PARTITION BY taskset, prompt, answer)
        ) GROUP BY ALL
    """,
}


class PassRateHistoryFilter(Filter):
    """Keeps tasks whose share of solved rollouts on record lies in [`min_rate`, `max_rate`].

    The record is that of `runs`, as `trinity_data.open` takes them; where none is written, of the stages of
    this run that ended before. `source: evals` takes the newest evaluation of each task instead of the
    rollouts to train on. A task with fewer than `min_rollouts` is `untried`.
    """

    name = "pass_rate_history_filter"
    reads = ("prompt", "answer")
    writes = ("pass_rate", "usage_frequency")
    of_stage = ("run_folder", "stage_name")

    def __init__(
        self,
        runs: Sequence[str] | None = None,
        min_rate: Annotated[float, Field(ge=0, le=1)] = 0.0,
        max_rate: Annotated[float, Field(ge=0, le=1)] = 1.0,
        source: Literal["rollouts", "evals"] = "rollouts",
        min_rollouts: Annotated[int, Field(gt=0)] = 1,
        untried: Literal["keep", "drop"] = "keep",
        run_folder: str | None = None,
        stage_name: str | None = None,
    ) -> None:
        check_bounds(min_rate, max_rate)
        self.min_rate, self.max_rate, self.min_rollouts = min_rate, max_rate, min_rollouts
        self.runs, self.source, self.untried = runs, source, untried
        self.run_folder, self.stage_name = run_folder, stage_name
        self._counts: dict[tuple[str, str], Floats] = {}

    def prepare(self) -> None:
        if self.runs is None and self.run_folder is None:
            raise OperatorError(
                f"{self.name!r} has no runs; write their names or folders in the argument runs"
            )
        if self.runs is None:
            # what the stage itself makes is left out: a resume would choose other tasks
            self._add(Path(str(self.run_folder)), without=str(self.stage_name))
        for folder in resolve_runs(self.runs or ()):
            self._add(folder, without="")

    def _add(self, folder: Path, *, without: str) -> None:
        # DuckDB takes long to import for the workers of operators that ask it nothing
        from trinity_data.query.result import Runs

        query = _QUERIES[self.source].format(stage=without.replace("'", "''"))
        for row in Runs([folder]).sql(query, timeout_seconds=None).arrow().to_pylist():
            counts = self._counts.setdefault((row["prompt"], row["answer"]), np.zeros(3))
            counts += (row["solved"], row["asked"], row["uses"])

    def apply(self, rows: pa.Table) -> FilterResult:
        keys = zip(
            values_of(text_column(rows, "prompt")), values_of(text_column(rows, "answer")), strict=True
        )
        counts = np.array([self._counts.get(key, np.zeros(3)) for key in keys]).reshape(-1, 3)
        is_untried = counts[:, 1] < self.min_rollouts
        rates = np.where(is_untried, np.nan, counts[:, 0] / np.maximum(counts[:, 1], 1.0))
        result = within(rates, self.min_rate, self.max_rate, what="pass rate on record")
        keep = np.where(is_untried, self.untried == "keep", result.keep)
        reasons = (
            f"pass rate on record below {self.min_rate:g}",
            f"pass rate on record above {self.max_rate:g}",
            f"fewer than {self.min_rollouts} rollouts on record",
        )
        which = np.where(is_untried, 2, np.where(rates > self.max_rate, 1, 0))
        scores = {"pass_rate": rates, "usage_frequency": counts[:, 2]}
        return FilterResult(keep, choose_reason(reasons, which), rates, scores)
