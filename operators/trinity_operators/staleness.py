"""How old the weights were that made an experience."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from trinity_data.schema import lists_of
from trinity_operators.base import Filter, FilterResult, Floats, float_column
from trinity_operators.filters import within


class StalenessFilter(Filter):
    """Drops experiences of weights more than `max_staleness` steps older than those that the step trains.

    A response that was begun under one version and ended under a later one counts from its oldest token.
    A batch drops what has waited too long (`algorithm.sample_strategy_args.max_staleness`); this filter drops
    what was old from the start, before the advantage of its group.
    """

    name = "staleness_filter"
    reads = ("step", "model_version", "version_spans")
    writes = ("staleness",)

    def __init__(self, max_staleness: Annotated[int, Field(ge=0)]) -> None:
        self.max_staleness = max_staleness

    def apply(self, rows: pa.Table) -> FilterResult:
        # step n trains the weights of version n − 1
        staleness = float_column(rows, "step") - 1 - _oldest_version(rows)
        result = within(staleness, None, self.max_staleness, what="staleness")
        return FilterResult(result.keep, result.reason, staleness, {"staleness": staleness})


def _oldest_version(rows: pa.Table) -> Floats:
    """The lowest version of any token of a row."""
    versions_R = float_column(rows, "model_version")
    spans = lists_of(rows["version_spans"])
    owners_S = np.asarray(pc.list_parent_indices(spans).to_numpy(), dtype=np.int64)
    if len(owners_S):
        versions_S = pc.struct_field(spans.flatten(), "version").to_numpy(zero_copy_only=False)
        np.minimum.at(versions_R, owners_S, np.asarray(versions_S, dtype=np.float64))
    return versions_R
