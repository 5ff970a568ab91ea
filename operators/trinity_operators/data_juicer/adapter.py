"""Data-Juicer's filters and mappers, in process and by their own names.

Nothing is ever installed at run time: a module that an operator needs and that is not there is an error
before the run starts.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from trinity_data.errors import OperatorError
from trinity_operators.base import Column, Filter, FilterResult, Mapper, Operator, OperatorSpecError
from trinity_operators.data_juicer.signatures import arguments, describe

log = logging.getLogger(__name__)

STATS, META = "__dj__stats__", "__dj__meta__"
"""`data_juicer.utils.constant.Fields`, whose import would bring in the whole package."""

INSTEAD = {
    "Deduplicator": "use exact_duplicate_filter",
    "Selector": "filter by a score, as difficulty_filter does",
    "Grouper": "group operators of this project see whole groups of experiences",
    "Aggregator": "aggregate with `trinity-data sql` after the run",
}

UNBOUNDED = 2**62
"""Data-Juicer writes sys.maxsize where there is no bound."""


@lru_cache(maxsize=1)
def data_juicer_ops() -> Any:
    """The module `data_juicer.ops`, which from then on can install nothing and logs nothing.

    Data-Juicer would install what an operator misses with uv, then with pip. Child processes inherit the
    refusal.
    """
    from loguru import logger

    def refuse_install(package_spec: str, pip_args: object = None) -> bool:
        raise ImportError(package_spec)

    os.environ.update(UV_OFFLINE="1", PIP_NO_INDEX="1")
    logger.disable("data_juicer")
    ops = importlib.import_module("data_juicer.ops")
    lazy_loader: Any = importlib.import_module("data_juicer.utils.lazy_loader")
    lazy_loader.LazyLoader._install_package = staticmethod(refuse_install)
    return ops


class DataJuicerFilter(Filter):
    """A filter of Data-Juicer's: its statistics are kept as scores,
    the first of them as the value compared.
    """

    def __init__(self, op: Any, args: Mapping[str, Any]) -> None:
        self.op, self.args = op, args
        _describe(self, op, args)

    def apply(self, rows: pa.Table) -> FilterResult:
        samples = _samples(self, rows)
        samples[STATS] = [{} for _ in range(rows.num_rows)]
        if self.op.is_batched_op():
            samples = self.op.compute_stats_batched(samples)
            kept = list(self.op.process_batched(samples))
        else:
            measured = [self.op.compute_stats_single(sample) for sample in _one_by_one(samples)]
            samples[STATS] = [sample[STATS] for sample in measured]
            kept = [self.op.process_single(sample) for sample in measured]
        keep = np.array([bool(k) for k in kept], dtype=np.bool_)
        numbers, bounds = _numbers(samples[STATS]), _bounds(self.op)
        # a statistic named like a column of the task set is not written over it
        scores = {
            name: values
            for name, values in numbers.items()
            if name not in rows.column_names or rows.schema.field(name).type == pa.float64()
        }
        reasons = [
            "" if is_kept else _reason(self.op, stat, bounds)
            for stat, is_kept in zip(samples[STATS], keep, strict=True)
        ]
        return FilterResult(keep, reasons, next(iter(numbers.values()), None), scores)


class DataJuicerMapper(Mapper):
    """A mapper of Data-Juicer's: the texts it changes are replaced, the numbers it adds are scores."""

    def __init__(self, op: Any, args: Mapping[str, Any]) -> None:
        self.op, self.args = op, args
        _describe(self, op, args)

    def map(self, rows: pa.Table) -> Mapping[str, Column]:
        samples = _samples(self, rows)
        if self.name in data_juicer_ops().TAGGING_OPS.modules:
            samples[META] = [{} for _ in range(rows.num_rows)]
        before = {name: list(values) for name, values in samples.items()}
        if self.op.is_batched_op():
            after = self.op.process_batched(samples)
        else:
            mapped = [self.op.process_single(sample) for sample in _one_by_one(samples)]
            after = {name: [sample.get(name) for sample in mapped] for name in mapped[0]}
        return self._changes(rows, before, after)

    def _changes(
        self, rows: pa.Table, before: Mapping[str, list[Any]], after: Mapping[str, list[Any]]
    ) -> dict[str, Column]:
        """The text first, then what else differs: scores of new numbers, other columns of text."""
        given = "text_key" in self.args
        text_key = self.args["text_key"] if given else default_text_key(rows)
        texts = after[text_key if given else "text"]
        if len(texts) != rows.num_rows:
            raise OperatorError(
                f"{self.name!r} makes {len(texts)} rows of {rows.num_rows}; a mapper keeps its rows"
            )
        columns: dict[str, Column] = {text_key: texts}
        columns.update(_numbers(after.get(META, [])))
        for name, values in after.items():
            if name in (text_key, "text", META):
                continue
            if name not in before and all(isinstance(v, int | float | None) for v in values):
                columns[name] = [np.nan if v is None else float(v) for v in values]
            elif (
                name in rows.column_names
                and pa.types.is_string(rows.schema.field(name).type)
                and values != before[name]
            ):
                columns[name] = values
        return columns


def adapt(name: str, args: Mapping[str, Any]) -> Operator:
    """Data-Juicer's operator `name` as one of ours.

    Raises OperatorSpecError for what cannot run in process.
    """
    ops = data_juicer_ops()
    kind = ops.OPERATORS.modules[name]
    family = next((n for n in ("Filter", "Mapper") if issubclass(kind, getattr(ops, n))), None)
    if family is None:
        found = next((n for n in INSTEAD if issubclass(kind, getattr(ops, n))), "operator of that kind")
        raise OperatorSpecError(
            f"operator {name!r}: a {found} of Data-Juicer cannot be used yet; "
            f"{INSTEAD.get(found, 'leave it out')}"
        )
    checked = arguments(name, family, kind, kind._BASE_PARAMS, args)
    operator: Operator
    try:
        op = kind(**checked)
        operator = DataJuicerFilter(op, args) if family == "Filter" else DataJuicerMapper(op, args)
        if not operator.calls_model:
            _probe(operator)
    except ImportError as error:
        missing = error.name or str(error)
        raise OperatorSpecError(
            f"operator {name!r} needs the package {missing!r}, which is not installed; "
            "install it before the run"
        ) from error
    except OSError as error:
        what = f"it wants to fetch a file and cannot: {str(error)[:120]}"
        raise OperatorSpecError(
            f"operator {name!r}: {what}; give a folder of yours in its arguments"
        ) from error
    # the boundary to Data-Juicer: the message names the operator, whatever building it raises
    except Exception as error:
        raise OperatorSpecError(f"operator {name!r}: {type(error).__name__}: {error}") from error
    return operator


def default_text_key(rows: pa.Table) -> str:
    """The text of a row: an experience's response, a task's prompt."""
    for name in ("response_text", "prompt", "text"):
        if name in rows.column_names:
            return name
    raise OperatorError(
        f"no text_key is given, and the rows have neither response_text nor prompt: {rows.column_names}"
    )


def _describe(operator: Operator, op: Any, args: Mapping[str, Any]) -> None:
    describe(operator, op._name, args)
    operator.calls_model = any(hasattr(op, key) for key in ("api_model", "sampling_params", "model_params"))
    operator.pure = not operator.calls_model


def _samples(operator: DataJuicerFilter | DataJuicerMapper, rows: pa.Table) -> dict[str, list[Any]]:
    """The rows as Data-Juicer wants them. Token lists stay behind unless an argument names them."""
    named = set(_words(operator.args))
    samples: dict[str, list[Any]] = {}
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        if pa.types.is_map(column.type):
            samples[name] = [None if entry is None else dict(entry) for entry in column.to_pylist()]
        elif name in named or not (
            pa.types.is_list(column.type) and pa.types.is_primitive(column.type.value_type)
        ):
            samples[name] = column.to_pylist()
    if "text_key" not in operator.args:
        samples["text"] = [text or "" for text in samples[default_text_key(rows)]]
    return samples


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value.split(".")[0]
    elif isinstance(value, Mapping):
        yield from _words(list(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _words(part)


def _one_by_one(samples: Mapping[str, list[Any]]) -> Iterable[dict[str, Any]]:
    names = list(samples)
    return (dict(zip(names, values, strict=True)) for values in zip(*samples.values(), strict=True))


def _numbers(stats: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Every statistic that is a number in some row; NaN in a row without it."""
    names = dict.fromkeys(
        k for stat in stats for k, v in stat.items() if isinstance(v, int | float | np.number)
    )
    return {
        name: [
            float(v) if isinstance(v := stat.get(name), int | float | np.number) else np.nan for stat in stats
        ]
        for name in names
    }


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


def _probe(operator: DataJuicerFilter | DataJuicerMapper) -> None:
    """One made-up row, so that a missing module comes to light now.

    What else goes wrong is the row's fault.
    """
    row = {
        "prompt": ["A probe of two words."],
        operator.args.get("text_key", "response_text"): ["A probe of two words."],
    }
    try:
        if isinstance(operator, DataJuicerFilter):
            operator.apply(pa.table(row))
        else:
            operator.map(pa.table(row))
    except ImportError:
        raise
    except Exception as error:
        log.debug("%s on a probe: %s", operator.name, error)
