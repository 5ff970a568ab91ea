"""The counts of a step that an earlier session of the run began, read from the ledger.

Rows in and out, errors and dropped tokens follow from the decisions. What operators report themselves is in
no row: it is written as `progress` in the commit of the outcomes that it is about, and counts only where it
is of exactly the stored decisions. A branch has none of the step that the explorer was in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.schema import filled, group_of, values_of
from trinity_data.store.protocol import ReadableStore
from trinity_operators.counts import DROPPED_TOKENS, ERRORS, Metric, OperatorCount
from trinity_operators.runner import ERROR_REASON

PREFIX = "operator_metrics"
"""What the keys begin with."""
_IDENTITY = ("operator", "position", "version")
_Key: TypeAlias = tuple[Any, ...]
"""Values of `_IDENTITY`, and the rows in."""


def metrics_progress(
    counts: Mapping[int, Sequence[OperatorCount]], *, stage: str, explorer: str
) -> dict[str, Any]:
    """What goes into a commit of outcomes, as its `progress`: what operators have reported so far of the
    steps that go on, whose counts these are. Empty where none has reported anything.
    """
    by_step = [{"step": step, "reported": found} for step in counts if (found := _reports(counts[step]))]
    return {f"{PREFIX}/{stage}/{explorer}": by_step} if by_step else {}


def _reports(counts: Sequence[OperatorCount]) -> list[dict[str, Any]]:
    reported = []
    for count in counts:
        metrics = {
            name: [one.value, one.rows]
            for name, one in count.metrics.items()
            if name not in (ERRORS, DROPPED_TOKENS)
        }
        if metrics:
            identity = {name: getattr(count, name) for name in (*_IDENTITY, "rows_in")}
            reported.append(identity | {"metrics": metrics})
    return reported


def stored_counts(
    store: ReadableStore, *, stage: str, step: int, groups: Sequence[str]
) -> list[OperatorCount]:
    """Of the experiences of these groups of a step."""
    columns = [*_IDENTITY, "row_kind", "row_id", "kept", "reason", "microseconds"]
    decisions = store.of_steps("decisions", stage, step, step, columns=columns)
    decisions = decisions.filter(pc.equal(decisions["row_kind"], pa.scalar("experience")))
    of_groups = [group_of(row) for row in values_of(decisions["row_id"])]
    decisions = decisions.filter(pc.is_in(pa.array(of_groups, pa.string()), pa.array(groups, pa.string())))
    # a row that was dropped as stale or untrainable has a decision without a position
    decisions = decisions.filter(pc.is_valid(decisions["position"]))
    is_error = pc.starts_with(filled(decisions["reason"], ""), ERROR_REASON)
    dropped = pc.invert(decisions["kept"])
    lengths = store.read(values_of(decisions["row_id"].filter(dropped)), columns=["response_length"])
    tokens = pc.replace_with_mask(
        pa.repeat(pa.scalar(0, pa.int64()), decisions.num_rows),
        dropped.combine_chunks(),
        filled(lengths["response_length"].cast(pa.int64()), 0).combine_chunks(),
    )
    sums = (
        decisions.append_column("error", is_error).append_column("tokens", tokens).group_by(list(_IDENTITY))
    )
    totals = sums.aggregate(
        [("kept", "count"), *((name, "sum") for name in ("kept", "microseconds", "error", "tokens"))]
    )
    reported = _reported(store, stage=stage, step=step)
    counts = []
    for row in totals.to_pylist():
        key = (*(row[name] for name in _IDENTITY), row["kept_count"])
        metrics = dict(reported.get(key, {}))
        if row["error_sum"]:
            metrics[ERRORS] = Metric(float(row["error_sum"]), 0)
        if row["tokens_sum"]:
            metrics[DROPPED_TOKENS] = Metric(float(row["tokens_sum"]), 0)
        counts.append(
            OperatorCount(
                operator=row["operator"],
                position=row["position"],
                version=row["version"],
                rows_in=row["kept_count"],
                rows_out=row["kept_sum"],
                microseconds=row["microseconds_sum"],
                metrics=metrics,
            )
        )
    return counts


def _reported(store: ReadableStore, *, stage: str, step: int) -> dict[_Key, dict[str, Metric]]:
    """By whichever explorer; empty where what is stored is of other steps."""
    return {
        tuple(each[name] for name in (*_IDENTITY, "rows_in")): {
            name: Metric(number, rows) for name, (number, rows) in each["metrics"].items()
        }
        for by_step in store.progress_below(f"{PREFIX}/{stage}/").values()
        for found in by_step
        if found["step"] == step
        for each in found["reported"]
    }
