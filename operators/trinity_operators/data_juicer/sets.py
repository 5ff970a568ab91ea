"""Data-Juicer's operators that need the whole data set: deduplicators, selectors, groupers and aggregators.

No row changes its place. A grouper numbers the groups, which the aggregators behind it see; what an
aggregator makes of a group is written to each of its rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from trinity_data.errors import OperatorError
from trinity_operators.base import Filter, FilterResult, Mapper, MapperResult
from trinity_operators.data_juicer.operators import DataJuicerOperator
from trinity_operators.data_juicer.samples import (
    META,
    Samples,
    aliases,
    changes_of,
    names_in,
    numbers,
    one_by_one,
    others,
    together,
)

BATCH_META, GROUP, ROW = "__dj__batch_meta__", "__dj__group__", "__dj__uid"
_HASH = "__dj__hash"


class DataJuicerSetFilter(DataJuicerOperator, Filter):
    """A deduplicator or selector: keeps what is left of the data set."""

    whole_set = True

    def apply(self, rows: pa.Table) -> FilterResult:
        # the text, and what an argument names, are the only columns that such an operator reads
        named = {self.op.text_key, *names_in(self.args)}
        samples = {name: values for name, values in self.samples(rows).items() if name in named}
        samples[ROW] = list(range(rows.num_rows))
        hashes: list[Any] = [None] * rows.num_rows
        if hasattr(self.op, "compute_hash"):
            hashed = [self.op.compute_hash(sample) for sample in one_by_one(samples)]
            samples = together(hashed)
            hashes = samples.get(_HASH, hashes)
        left = self._left(samples)
        places = np.array(left[ROW], dtype=np.int64)
        keep = np.isin(np.arange(rows.num_rows), places)
        column = aliases(self.args, rows).get("text", str(self.args.get("text_key")))
        texts = dict(zip(left[ROW], left.get(self.op.text_key, []), strict=False))
        given = rows[column].to_pylist() if column in rows.column_names else []
        changed = [texts.get(number, text) for number, text in enumerate(given)]
        written = {column: changed} if changed != [text or "" for text in given] else {}
        return FilterResult(keep, self._reasons(rows, keep, hashes), scores=written)

    def _left(self, samples: Samples) -> dict[str, list[Any]]:
        datasets: Any = importlib.import_module("datasets")
        data: Any = importlib.import_module("data_juicer.core.data")
        datasets.disable_progress_bars()
        module: Any = importlib.import_module(type(self.op).__module__)
        if hasattr(module, "tqdm"):
            module.tqdm = partial(module.tqdm, disable=True)
        left = self.op.process(data.NestedDataset.from_dict(samples))
        left = left[0] if isinstance(left, tuple) else left
        return {name: list(left[name]) for name in left.column_names}

    def _reasons(self, rows: pa.Table, keep: np.ndarray[Any, Any], hashes: list[Any]) -> list[str]:
        id_column = "experience_id" if "experience_id" in rows.column_names else "task_id"
        ids: list[Any] = rows[id_column].to_pylist()
        first: dict[Any, str] = {}
        for value, row_id, is_kept in zip(hashes, ids, keep, strict=True):
            if is_kept and isinstance(value, str):
                first.setdefault(value, row_id)
        what = "a near duplicate" if hasattr(self.op, "compute_hash") else "not selected"
        return [
            f"duplicate of {first[value]}" if isinstance(value, str) and value in first else what
            for value in hashes
        ]


class DataJuicerGrouper(DataJuicerOperator, Mapper):
    """Numbers the groups of the data set in the order of their first rows."""

    whole_set = True

    def map(self, rows: pa.Table) -> MapperResult:
        samples = list(one_by_one(self.samples(rows) | {ROW: list(range(rows.num_rows))}))
        groups = np.arange(rows.num_rows)
        # naive_reverse_grouper divides groups into their rows
        if self.name != "naive_reverse_grouper":
            for number, group in enumerate(self.op.process(samples)):
                groups[group[ROW]] = number
        return MapperResult({}, {GROUP: pa.array(groups)})


class DataJuicerAggregator(DataJuicerOperator, Mapper):
    """Asks once for every group, and writes the result to each of its rows."""

    whole_set = True

    def map(self, rows: pa.Table) -> MapperResult:
        if GROUP not in rows.column_names:
            raise OperatorError(
                f"{self.name!r} needs groups; put key_value_grouper or naive_grouper before it"
            )
        codes = np.asarray(rows[GROUP].to_numpy())
        samples = list(one_by_one(self.samples(rows)))
        before = together(samples)
        members = [np.flatnonzero(codes == code) for code in np.unique(codes)]
        batches = [
            together([samples[row] for row in group]) | {BATCH_META: dict[str, Any]()} for group in members
        ]
        after, errors = [dict(sample) for sample in samples], [""] * len(samples)
        meta: list[Mapping[str, Any]] = [{}] * len(samples)
        asked = self.each(self.op.process_single, together(batches))
        for group, result in zip(members, asked, strict=True):
            error = self.error_of(result)
            for place, row in enumerate(group):
                errors[row] = error
                if not error:
                    meta[row] = result.result[BATCH_META]
                    after[row][META] = result.result.get(META, before.get(META, [{}] * len(samples)))[place]
        return self._result(rows, before, together(after), meta, errors)

    def _result(
        self,
        rows: pa.Table,
        before: Samples,
        after: Samples,
        meta: list[Mapping[str, Any]],
        errors: list[str],
    ) -> MapperResult:
        changes = changes_of(rows, aliases(self.args, rows), before, after)
        columns = changes.columns | numbers(meta)
        return MapperResult(columns, changes.added | others(meta), totals=self.totals, errors=errors)
