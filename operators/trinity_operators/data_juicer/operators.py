"""Data-Juicer's filters and mappers as operators of ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from trinity_data.errors import OperatorError
from trinity_operators.base import (
    Expander,
    Expansion,
    Filter,
    FilterResult,
    Mapper,
    MapperResult,
    Operator,
)
from trinity_operators.counts import ERRORS
from trinity_operators.data_juicer.loading import data_juicer_ops
from trinity_operators.data_juicer.model_calls import (
    CANNOT_READ,
    IN_FLIGHT,
    AskedRow,
    ask_about_each,
    endpoints_of,
    refuse_noted_errors,
)
from trinity_operators.data_juicer.samples import (
    META,
    STATS,
    Samples,
    aliases,
    changes_of,
    numbers,
    one_by_one,
    others,
    samples_of,
    together,
)
from trinity_operators.data_juicer.signatures import describe
from trinity_operators.endpoint import LanguageModel
from trinity_operators.runner import ERROR_REASON

_YES_OR_NO = re.compile(r"\s*(yes|no\b|[yn]\s*$)", re.IGNORECASE)
UNBOUNDED = 2**62
"""Data-Juicer writes sys.maxsize where there is no bound."""


class DataJuicerOperator(Operator):
    """An operator of Data-Juicer's with the arguments it was given."""

    def __init__(self, op: Any, args: Mapping[str, Any]) -> None:
        self.op, self.args = op, args
        describe(self, op._name, args)
        self.endpoints = endpoints_of(op)
        self.calls_model = bool(self.endpoints) or any(
            hasattr(op, key) for key in ("api_model", "sampling_params", "model_params")
        )
        self.pure = not self.calls_model
        self.in_flight = int(args.get("num_proc") or IN_FLIGHT)
        self.totals: dict[str, float] = {}
        """Of the last call."""

    def asks_model_of(self, names: Collection[str]) -> bool:
        return any(endpoint.asks_model_of(names) for endpoint in self.endpoints)

    def connect_models(self, models: Mapping[str, LanguageModel]) -> None:
        for endpoint in self.endpoints:
            endpoint.connect(models)

    def prepare(self) -> None:
        for endpoint in self.endpoints:
            endpoint.probe()

    def samples(self, rows: pa.Table) -> Samples:
        samples = samples_of(self.args, rows)
        if META not in samples and self.name in data_juicer_ops().TAGGING_OPS.modules:
            samples[META] = [{} for _ in range(rows.num_rows)]
        return samples

    def each(self, work: Callable[[dict[str, Any]], Any], samples: Samples) -> list[AskedRow]:
        """`work` on every sample: at once where it asks an endpoint, else one after another."""
        if not self.endpoints:
            return [AskedRow(work(sample)) for sample in one_by_one(samples)]
        rows, counts = ask_about_each(work, list(one_by_one(samples)), self.in_flight)
        self.totals = {name: float(value) for name, value in vars(counts).items()}
        return rows

    def error_of(self, row: AskedRow) -> str:
        """Why a row has no answer; empty where it has one."""
        error = row.calls.error
        how = "" if error.startswith(CANNOT_READ) else "got no answer: "
        return f"{self.op._name} {how}{error}" if error else ""


class DataJuicerFilter(DataJuicerOperator, Filter):
    """A filter of Data-Juicer's: its statistics are kept as scores,
    the first of them as the value compared.
    """

    def apply(self, rows: pa.Table) -> FilterResult:
        samples = self.samples(rows)
        samples.setdefault(STATS, [{} for _ in range(rows.num_rows)])
        known = [set(stat) for stat in samples[STATS]]
        keep, errors, samples[STATS] = self._decisions(samples)
        stats = [
            {name: value for name, value in stat.items() if name not in there}
            for stat, there in zip(samples[STATS], known, strict=True)
        ]
        measured, bounds = numbers(stats), _bounds(self.op)
        # a statistic named like a column of the task set is not written over it
        scores = {
            name: values
            for name, values in measured.items()
            if name not in rows.column_names or rows.schema.field(name).type == pa.float64()
        }
        reasons = [
            "" if is_kept else _reason(self.op, stat, bounds)
            for stat, is_kept in zip(samples[STATS], keep, strict=True)
        ]
        added = {name: column for name, column in others(stats).items() if name not in rows.column_names}
        value = next(iter(measured.values()), None)
        return FilterResult(keep, reasons, value, scores, added, totals=self.totals, errors=errors)

    def _decisions(self, samples: Samples) -> tuple[np.ndarray[Any, Any], list[str], list[dict[str, Any]]]:
        """Which rows are kept, why others got no answer, and the statistics."""
        if self.op.is_batched_op() and not self.endpoints:
            samples = self.op.compute_stats_batched(samples)
            kept, errors = list(self.op.process_batched(samples)), [""] * len(samples[STATS])
            return np.array([bool(k) for k in kept], dtype=np.bool_), errors, samples[STATS]
        asked = self.each(self.op.compute_stats_single, samples)
        errors = [self._unanswered(row) for row in asked]
        keep = [
            not error and bool(self.op.process_single(row.result))
            for row, error in zip(asked, errors, strict=True)
        ]
        stats = [{} if error else row.result.get(STATS, {}) for row, error in zip(asked, errors, strict=True)]
        return np.array(keep, dtype=np.bool_), errors, stats

    def _unanswered(self, row: AskedRow) -> str:
        """Data-Juicer leaves the score at 0, and most often the record empty, where it cannot read an answer
        or finds no scores in it; what is neither yes nor no it takes for a no.
        """
        if (error := self.error_of(row)) or row.result is None or not row.calls.requests:
            return error
        stats, answer = row.result.get(STATS, {}), row.calls.answer
        records = [value for name, value in stats.items() if name.endswith("_record")]
        without_scores = bool(getattr(self.op, "dim_required_keys", None)) and 0.0 in stats.values()
        if records and (without_scores or not any(records)):
            return f"{self.op._name} {CANNOT_READ} {answer[:80]!r}"
        if self.op._name == "llm_condition_filter" and not _YES_OR_NO.match(answer):
            return f"{self.op._name} asks for yes or no, found {answer[:80]!r}"
        return ""


class DataJuicerMapper(DataJuicerOperator, Mapper):
    """A mapper of Data-Juicer's: the texts it changes are replaced, the numbers it adds are scores."""

    def map(self, rows: pa.Table) -> MapperResult:
        samples = self.samples(rows)
        before = {name: list(values) for name, values in samples.items()}
        errors = [""] * rows.num_rows
        if self.op.is_batched_op() and not self.endpoints:
            after = self.op.process_batched(samples)
        else:
            asked = self.each(self._process_one, samples)
            errors = [self.error_of(row) for row in asked]
            unchanged = one_by_one(before)
            after = together(
                [
                    sample if error else row.result
                    for row, error, sample in zip(asked, errors, unchanged, strict=True)
                ]
            )
        count = len(next(iter(after.values()), []))
        if count != rows.num_rows:
            raise OperatorError(
                f"{self.name!r} makes {count} rows of {rows.num_rows}; a mapper keeps its rows"
            )
        changes = changes_of(rows, aliases(self.args, rows), before, after)
        return MapperResult(changes.columns, changes.added, totals=self.totals, errors=errors)

    def _process_one(self, sample: dict[str, Any]) -> Any:
        known = set(sample.get(META) or ())
        if self.op.is_batched_op():
            batch = self.op.process_batched({name: [value] for name, value in sample.items()})
            result = {name: values[0] for name, values in batch.items()}
        else:
            result = self.op.process_single(sample)
        refuse_noted_errors(result.get(META) or {}, known)
        return result


class DataJuicerExpander(DataJuicerOperator, Expander):
    """A mapper of Data-Juicer's that makes several rows of one, or none: it gets one row at a time."""

    def expand(self, rows: pa.Table) -> Expansion:
        samples = self.samples(rows)
        before = {name: list(values) for name, values in samples.items()}
        made = self.each(self._rows_of, samples)
        # without an answer an operator may return the row as it was
        found = [() if row.calls.error else row.result for row in made]
        parents = [number for number, samples_made in enumerate(found) for _ in samples_made]
        after = together([each for samples_made in found for each in samples_made])
        repeated = {name: [values[parent] for parent in parents] for name, values in before.items()}
        changes = changes_of(rows, aliases(self.args, rows), repeated, after)
        errors = [self.error_of(row) for row in made]
        reasons = [f"{ERROR_REASON}{error}" if error else "becomes no row" for error in errors]
        totals = self.totals | ({ERRORS: float(sum(map(bool, errors)))} if any(errors) else {})
        return Expansion(parents, changes.columns, changes.added, reasons, totals=totals)

    def _rows_of(self, sample: dict[str, Any]) -> Sequence[Mapping[str, Any]]:
        return list(one_by_one(self.op.process_batched({name: [value] for name, value in sample.items()})))


def _reason(op: Any, stat: Mapping[str, Any], bounds: str) -> str:
    """`text_len 512 outside [10, 400]`."""
    if not stat:
        return f"refused by {op._name}"
    name, value = next(
        ((k, v) for k, v in stat.items() if isinstance(v, int | float)), next(iter(stat.items()))
    )
    shown = f"{value:.6g}" if isinstance(value, float) else repr(value)
    return f"{name} {shown} {bounds}" if bounds else f"{name} {shown} refused by {op._name}"


def _bounds(op: Any) -> str:
    """The range of an operator that has one; nothing when it has none or several."""
    low = [v for k, v in vars(op).items() if k.startswith("min_") and _is_number(v)]
    high = [v for k, v in vars(op).items() if k.startswith("max_") and _is_number(v)]
    if len(low) > 1 or len(high) > 1 or not (low or high):
        return ""
    start = f"[{low[0]}" if low and low[0] > -UNBOUNDED else "(-∞"
    end = f"{high[0]}]" if high and high[0] < UNBOUNDED else "∞)"
    return f"{'inside' if op.reversed_range else 'outside'} {start}, {end}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
