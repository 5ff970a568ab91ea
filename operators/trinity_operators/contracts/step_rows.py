"""The rows of one step that contracts are about: those of explorers whose rollout ended without an error.

Read from the store, and the same during the step and long afterwards: whether a batch took a row since, or a
contract dropped it, makes no difference.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.config import ContractConfig
from trinity_data.errors import OperatorError, unknown_name
from trinity_data.schema import EXPERIENCES, Values, filled, group_of
from trinity_data.store.participants import explorers_of
from trinity_data.store.protocol import ReadableStore
from trinity_data.store.sql import SqlSession
from trinity_data.store.types import State
from trinity_data.store.views import quoted
from trinity_operators.base import Codes, Floats
from trinity_operators.expressions import Expression

MORE_COLUMNS = ("advantage", "shaped_reward", "scores")
"""Of the outcomes of a row."""
KNOWN_COLUMNS = (*EXPERIENCES.names, *MORE_COLUMNS)
"""What an expression of a contract may read."""
GROUP_TEXT = "response_text"
"""What `duplicates` compares unless a contract names another column."""
_READ_WITHOUT_COLUMN = {"contamination": "task_id", "duplicates": GROUP_TEXT}
STEP_ROWS = "step_rows"
"""The table that queries of a contract see beside those of the run."""
_STEP_ROWS = """
SELECT * EXCLUDE (state, trained_step, uses, dropped_by) FROM experiences
WHERE stage = {stage} AND step = {step} AND explorer IN ({explorers}) AND coalesce(error, '') = ''
"""
_MEMORY, _SECONDS = "2GB", 300.0


def step_rows_query(stage: str, explorers: Collection[str], step: int) -> str:
    """What `step_rows` holds."""
    names = ", ".join(map(quoted, sorted(explorers)))
    return _STEP_ROWS.format(stage=quoted(stage), explorers=names, step=step)


@lru_cache(maxsize=256)
def column_expression(text: str) -> Expression:
    """Of a contract, which asks for it at every step. Raises OperatorError for an unknown column."""
    expression = Expression.parse(text)
    for name in expression.columns:
        if name not in KNOWN_COLUMNS:
            raise OperatorError(unknown_name("column", name, KNOWN_COLUMNS))
    return expression


def columns_of(contracts: Sequence[ContractConfig]) -> set[str]:
    """What all of them read of the rows of a step, but for their queries."""
    columns = set[str]()
    for contract in contracts:
        text = contract.column or _READ_WITHOUT_COLUMN.get(contract.check)
        # the check itself says what is wrong with an expression
        with suppress(OperatorError):
            columns.update(column_expression(text).columns if text else ())
    return columns


@dataclass(frozen=True)
class Sample:
    """Numbers of a column in some steps, without missing ones. N numbers, G groups."""

    numbers_N: Floats
    means_G: Floats
    """Of each group."""

    @staticmethod
    def of_all(samples: Sequence[Sample]) -> Sample:
        return Sample(
            np.concatenate([each.numbers_N for each in samples]),
            np.concatenate([each.means_G for each in samples]),
        )


class StepRows:
    """Of one step; to be closed. `operators` are the rows of that table about the step, where they are not
    stored yet; `columns` are read at once with the first that is asked for.
    """

    def __init__(
        self,
        store: ReadableStore,
        stage: str,
        explorer: str,
        step: int,
        operators: pa.Table | None = None,
        columns: Collection[str] = (),
    ) -> None:
        self.store, self.stage, self.explorer, self.step = store, stage, explorer, step
        self._operators, self._planned = operators, columns
        self._columns: dict[str, pa.ChunkedArray[Any]] = {}
        self._session: SqlSession | None = None

    def __enter__(self) -> StepRows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            self._session.close()

    @cached_property
    def ids(self) -> list[str]:
        states = self.store.group_progress(self.stage, self.step)
        return [
            row
            for row, state in states
            if row.partition("/")[0] in self.explorers and state is not State.FAILED
        ]

    @cached_property
    def explorers(self) -> Collection[str]:
        """Who may have made rows of the step."""
        return explorers_of(self.store, self.explorer)

    def values(self, text: str) -> Values:
        """An expression of the columns, for each row. Raises OperatorError for an unknown column."""
        expression = column_expression(text)
        missing = {*expression.columns, "step"} - self._columns.keys()
        if missing:
            missing |= {*self._planned} - self._columns.keys()
            rows = self.store.read(self.ids, columns=sorted(missing))
            self._columns |= dict(zip(rows.column_names, rows.columns, strict=True))
        return expression(pa.table(self._columns))

    def numbers(self, text: str) -> Floats:
        """The same as float64; a missing value is NaN."""
        values = self.values(text)
        if not (pa.types.is_floating(values.type) or pa.types.is_boolean(values.type)):
            raise OperatorError(f"{text!r} is {values.type}; a number is expected")
        return np.asarray(values.cast(pa.float64()).to_numpy(zero_copy_only=False), np.float64)

    def sample(self, text: str) -> Sample:
        numbers = self.numbers(text)
        known = ~np.isnan(numbers)
        numbers, codes = numbers[known], self._group_codes[known]
        counts = np.bincount(codes)
        sums = np.bincount(codes, weights=numbers)
        return Sample(numbers, sums[counts > 0] / counts[counts > 0])

    @cached_property
    def _group_codes(self) -> Codes:
        """For each row the number of its group."""
        numbers: dict[str, int] = {}
        codes = [numbers.setdefault(group_of(row), len(numbers)) for row in self.ids]
        return np.array(codes, np.int64)

    def texts(self, text: str) -> list[str]:
        return [str(value) for value in self.values(text).to_pylist()]

    def contamination(self) -> Floats:
        """The score that `contamination_filter` gave the task of each row; 0 where it gave none."""
        tasks = self.texts("task_id")
        names = [*dict.fromkeys(tasks)]
        scores = self.store.tasks(names, stage=self.stage, columns=["scores"])["scores"]
        shares = filled(pc.map_lookup(scores, pa.scalar("contamination"), "first"), 0.0).to_pylist()
        by_task = dict(zip(names, shares, strict=True))
        return np.array([by_task[task] for task in tasks], np.float64)

    def query(self, sql: str) -> pa.Table:
        """What a query over the run and `step_rows` gives. Raises StoreError in DuckDB's words."""
        if self._session is None:
            self._session = SqlSession({"run": self.store.snapshot()}, _SECONDS, _MEMORY, None)
            self._session.define(STEP_ROWS, step_rows_query(self.stage, self.explorers, self.step))
        return self._session.query(sql)

    def rows_in_and_out(self, operator: str) -> tuple[int, int]:
        """Of an experience operator in the step; of a task operator in all that it has seen."""
        for counts in self._operator_counts():
            mine: Any = counts.filter(pc.equal(counts["operator"], pa.scalar(operator)))
            if mine.num_rows:
                return int(pc.sum(mine["rows_in"]).as_py()), int(pc.sum(mine["rows_out"]).as_py())
        return 0, 0

    def _operator_counts(self) -> Iterator[pa.Table]:
        """Rows of `operators`: of the step, then of the task pipeline."""
        if self._operators is not None:
            yield self._operators
        counts = self.store.table("operators", stage=self.stage)
        if self._operators is None:
            yield counts.filter(pc.equal(counts["step"], pa.scalar(self.step)))
        yield counts.filter(pc.equal(counts["pipeline"], pa.scalar("task")))
