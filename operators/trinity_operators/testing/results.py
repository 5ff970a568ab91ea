"""What one operator made of each row, in a form that can be compared, stored and shown."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from trinity_data.atomic import replace_text
from trinity_data.errors import ConfigError, OperatorError
from trinity_data.schema import values_of
from trinity_operators.base import Operator
from trinity_operators.preparation import prepared
from trinity_operators.runner import RowKind, run_operators
from trinity_operators.testing.rows import ID_COLUMNS

RowResult: TypeAlias = dict[str, Any]
"""Of a row its `id`, whether it is `kept`, the `reason`, and the columns that were `written`."""


def results_of(operator: Operator, rows: pa.Table, kind: RowKind) -> list[RowResult]:
    """What a prepared operator makes of the rows; those that it makes of others come last."""
    id_column = ID_COLUMNS[kind]
    result = run_operators([operator], rows, row_kind=kind, id_column=id_column, stage="test", step=1)
    reason_of = dict(zip(*(values_of(result.decisions[name]) for name in ("row_id", "reason")), strict=True))
    unwritten = {*rows.column_names} - {*operator.writes}
    names = [name for name in result.survivors.column_names if name not in unwritten]
    columns = result.survivors.select([id_column, *names]).to_pylist(maps_as_pydicts="lossy")
    written = {row.pop(id_column): row for row in columns}
    numbers = {name: values for name, values in result.values.items() if name not in rows.column_names}
    return [
        {
            "id": row_id,
            "kept": row_id in written,
            "reason": reason_of.get(row_id, ""),
            "written": _rounded(
                {name: float(values[number]) for name, values in numbers.items()} | written.get(row_id, {})
            ),
        }
        for number, row_id in enumerate(values_of(result.ids))
    ]


def _rounded(value: Any) -> Any:
    """For comparing: nine digits of a float, null for NaN, text for what JSON does not know."""
    if isinstance(value, float):
        return float(f"{value:.9g}") if np.isfinite(value) else (None if np.isnan(value) else str(value))
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return value if isinstance(value, str | int | None) else str(value)


def differences(expected: Sequence[RowResult], found: Sequence[RowResult]) -> list[str]:
    """Rows of which both say different things, in words."""
    before, after = ({result["id"]: result for result in each} for each in (expected, found))
    return [
        f"{row_id}: {_shown(before.get(row_id))}, then {_shown(after.get(row_id))}"
        for row_id in dict.fromkeys([*before, *after])
        if before.get(row_id) != after.get(row_id)
    ]


def _shown(result: RowResult | None) -> str:
    if result is None:
        return "no row"
    written = json.dumps(result["written"], ensure_ascii=False, sort_keys=True)
    text = ("kept" if result["kept"] else f"dropped: {result['reason']}") + (
        f" {written}" if written != "{}" else ""
    )
    return text if len(text) <= 120 else f"{text[:120]}…"


def run_on_ray(build: Callable[[], Operator], parts: Sequence[pa.Table], kind: RowKind) -> list[RowResult]:
    """The same by workers of Ray Data, each of which builds the operator. Ray must be running."""
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    numbers = ray.data.range(len(parts), override_num_blocks=2)
    numbers.context.enable_progress_bars = False
    rows = sorted(numbers.map(_Worker(build, kind, parts)).take_all(), key=itemgetter("id"))
    if errors := [row["error"] for row in rows if row["error"]]:
        raise OperatorError(errors[0])
    return [result for row in rows for result in json.loads(row["results"])]


class _Worker:
    """An error travels as data, since Ray would bury it in its own."""

    def __init__(self, build: Callable[[], Operator], kind: RowKind, parts: Sequence[pa.Table]) -> None:
        self.build, self.kind, self.parts = build, kind, parts

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        try:
            operator = self.build()
            with prepared([operator]):
                results = results_of(operator, self.parts[row["id"]], self.kind)
        except OperatorError as error:
            return row | {"results": "[]", "error": str(error)}
        return row | {"results": json.dumps(results), "error": ""}


def write_golden(file: Path, results: Sequence[RowResult]) -> None:
    """Stores the results, a line of JSON each."""
    lines = [json.dumps(result, ensure_ascii=False, sort_keys=True) for result in results]
    replace_text(file, "\n".join([*lines, ""]))


def read_golden(file: Path) -> list[RowResult]:
    """Raises ConfigError for a file that is not there or holds something else."""
    try:
        results: list[RowResult] = [
            json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()
        ]
    except FileNotFoundError:
        raise ConfigError(f"there is no file {str(file)!r}; write it with --renew") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    for number, result in enumerate(results, 1):
        if not isinstance(result, dict) or result.keys() != {"id", "kept", "reason", "written"}:
            raise ConfigError(f"{file}, line {number}: not a result of an operator; write it with --renew")
    return results
