"""What an operator did to its rows, in numbers: rows in and out, time, and what it reports itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from trinity_data.errors import OperatorError
from trinity_data.schema import OPERATORS
from trinity_data.status import Status
from trinity_operators.base import Operator
from trinity_operators.calls import Output

ERRORS = "errors"
"""The total, in `operators.metrics`, of the rows on which an operator failed."""
DROPPED_TOKENS = "dropped_tokens"
"""The total, in `operators.metrics`, of the response tokens of the experiences that an operator dropped."""


@dataclass(frozen=True)
class Metric:
    """A number that an operator reported: a mean over `rows`, or a total where that is 0."""

    value: float
    rows: int

    def __add__(self, other: Metric) -> Metric:
        """The same number over both calls."""
        rows = self.rows + other.rows
        if not rows:
            return Metric(self.value + other.value, 0)
        return Metric((self.value * self.rows + other.value * other.rows) / rows, rows)


@dataclass(frozen=True)
class OperatorCount:
    """What one operator did to one table."""

    operator: str
    position: int
    version: str
    rows_in: int
    rows_out: int
    microseconds: float
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """What the operator itself reported, by name."""

    def __add__(self, other: OperatorCount) -> OperatorCount:
        """The same operator over both tables."""
        metrics = dict(self.metrics)
        for name, metric in other.metrics.items():
            metrics[name] = metrics[name] + metric if name in metrics else metric
        return replace(
            self,
            rows_in=self.rows_in + other.rows_in,
            rows_out=self.rows_out + other.rows_out,
            microseconds=self.microseconds + other.microseconds,
            metrics=metrics,
        )

    @property
    def errors(self) -> int:
        """Rows on which the operator failed."""
        return int(self.metrics[ERRORS].value) if ERRORS in self.metrics else 0


def counts_table(
    counts: Sequence[OperatorCount],
    *,
    pipeline: Literal["task", "experience"],
    stage: str,
    step: int | None,
) -> pa.Table:
    """The `operators` rows of one run."""
    rows = [
        vars(count)
        | {"stage": stage, "step": step, "pipeline": pipeline}
        | {"metrics": [(name, metric.value) for name, metric in sorted(count.metrics.items())]}
        for count in counts
    ]
    return pa.Table.from_pylist(rows, schema=OPERATORS)


def show_counts(status: Status, operators: pa.Table) -> list[dict[str, Any]]:
    """Adds rows of `operators` to the live view, and returns them."""
    rows: list[dict[str, Any]] = operators.to_pylist()
    for row in rows:
        tokens = int(dict(row["metrics"] or ()).get(DROPPED_TOKENS, 0))
        of_a_step = row["step"] is not None
        status.count_operator(
            row["operator"], row["rows_in"], row["rows_out"], dropped_tokens=tokens if of_a_step else None
        )
    return rows


def reported_metrics(operator: Operator, output: Output, num_rows: int) -> dict[str, Metric]:
    """What an operator reports of a call; a number that is not finite says nothing and is left out."""
    metrics = {}
    for reported, rows in ((output.metrics, num_rows), (output.totals, 0)):
        for name, value in reported.items():
            if isinstance(value, bool) or not isinstance(value, int | float | np.number):
                raise OperatorError(f"{operator.label!r}: metric {name!r} must be a number, found {value!r}")
            if np.isfinite(value):
                metrics[name] = Metric(float(value), rows)
    return metrics
