"""Which tasks are worth most: a weighted sum of scores, and the best of the set.

S scores, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import numpy as np
import pyarrow as pa
from pydantic import Field

from trinity_data.config.data_processor import PRIORITY_WEIGHTS
from trinity_data.errors import OperatorError
from trinity_operators.base import Filter, FilterResult, Floats, float_column

PRIORITY = "priority"


class PriorityFilter(Filter):
    """Writes `priority`, the sum of `weights` × scores, and keeps the `top_k` tasks with the highest.

    A score is brought to [0, 1] over the task set: (score − smallest) / (largest − smallest). It counts as 0
    where a task has none, and where all tasks have the same. Without `weights` those of
    `data_processor.task_pipeline.priority_weights`, of the scores that are there. Equal priorities keep their
    order; -1 keeps all.
    """

    name = "priority_filter"
    writes = (PRIORITY,)
    whole_set = True

    def __init__(
        self, weights: Mapping[str, float] | None = None, top_k: Annotated[int, Field(ge=-1)] = -1
    ) -> None:
        if top_k == 0:
            raise OperatorError("top_k is 0, which keeps no task; write -1 to keep all of them")
        self.weights, self.top_k = dict(weights or PRIORITY_WEIGHTS), top_k
        self.reads = tuple(weights or ())

    def apply(self, rows: pa.Table) -> FilterResult:
        names = [name for name in self.weights if name in rows.column_names]
        if not names:
            known = ", ".join(self.weights)
            raise OperatorError(
                f"none of the scores {known} is there; put an operator before it that writes one"
            )
        priorities = sum((self.weights[name] * scaled(float_column(rows, name)) for name in names), start=0.0)
        priorities_R = np.asarray(priorities, dtype=np.float64)
        keep = np.ones(rows.num_rows, dtype=np.bool_)
        if 0 <= self.top_k < rows.num_rows:
            best = np.argsort(-priorities_R, kind="stable")[: self.top_k]
            keep[:] = False
            keep[best] = True
        return FilterResult(
            keep,
            f"not among the {self.top_k} of the highest priority",
            priorities_R,
            {PRIORITY: priorities_R},
        )


def scaled(scores_R: Floats) -> Floats:
    """From 0 for the smallest to 1 for the largest; 0 for those that are missing, and where all are equal."""
    present = scores_R[np.isfinite(scores_R)]
    extent = np.ptp(present) if len(present) else 0.0
    if not extent:
        return np.zeros(len(scores_R))
    scaled_R: Floats = np.nan_to_num((scores_R - present.min()) / extent, nan=0.0, posinf=0.0, neginf=0.0)
    return scaled_R
