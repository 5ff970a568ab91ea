"""The rows of one step that contracts are about: those of one explorer whose rollout ended without an error.

Read from the store, and the same during the step and long afterwards: whether a batch took a row since, or a
contract dropped it, makes no difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.errors import OperatorError, unknown_name
from trinity_data.schema import EXPERIENCES, Values, filled
from trinity_data.store.reader import StoreReader
from trinity_data.store.snapshot import take_snapshot
from trinity_data.store.sql import SqlSession
from trinity_data.store.types import State
from trinity_data.store.views import quoted
from trinity_operators.base import Floats
from trinity_operators.expressions import Expression

MORE_COLUMNS = ("advantage", "shaped_reward", "scores")
"""Of the outcomes of a row."""
STEP_ROWS = "step_rows"
"""The table that queries of a contract see beside those of the run."""
_STEP_ROWS = """
SELECT * EXCLUDE (state, trained_step, uses, dropped_by) FROM experiences
WHERE stage = {stage} AND step = {step} AND explorer = {explorer} AND coalesce(error, '') = ''
"""
_SHARES = """
SELECT r.experience_id, coalesce(t.contamination, 0) AS contamination
FROM step_rows r LEFT JOIN (
    SELECT task_id, max(scores['contamination']) AS contamination FROM tasks WHERE stage = {stage}
    GROUP BY ALL
) t ON t.task_id = r.task_id
"""
_MEMORY, _SECONDS = "2GB", 300.0


def step_rows_query(stage: str, explorer: str, step: int) -> str:
    """What `step_rows` holds."""
    return _STEP_ROWS.format(stage=quoted(stage), explorer=quoted(explorer), step=step)


@lru_cache(maxsize=256)
def _expression(text: str) -> Expression:
    """Of a contract, which asks for it at every step."""
    return Expression.parse(text)


class StepRows:
    """Of one step. `operators` are the rows of that table about the step, where they are not stored yet."""

    def __init__(
        self, store: StoreReader, stage: str, explorer: str, step: int, operators: pa.Table | None = None
    ) -> None:
        self.store, self.stage, self.explorer, self.step = store, stage, explorer, step
        self._operators = operators

    @cached_property
    def ids(self) -> list[str]:
        states = self.store.group_progress(self.stage, self.step)
        mine = f"{self.explorer}/"
        return [row for row, state in states if row.startswith(mine) and state is not State.FAILED]

    def values(self, text: str) -> Values:
        """An expression of the columns, for each row. Raises OperatorError for an unknown column."""
        expression = _expression(text)
        for name in expression.columns:
            if name not in (*EXPERIENCES.names, *MORE_COLUMNS):
                raise OperatorError(unknown_name("column", name, (*EXPERIENCES.names, *MORE_COLUMNS)))
        return expression(self.store.read(self.ids, columns=[*dict.fromkeys((*expression.columns, "step"))]))

    def numbers(self, text: str) -> Floats:
        """The same as float64; a missing value is NaN."""
        values = self.values(text)
        if not (pa.types.is_floating(values.type) or pa.types.is_boolean(values.type)):
            raise OperatorError(f"{text!r} is {values.type}; a number is expected")
        return np.asarray(values.cast(pa.float64()).to_numpy(zero_copy_only=False), np.float64)

    def texts(self, text: str) -> list[str]:
        return [str(value) for value in self.values(text).to_pylist()]

    def contamination(self) -> Floats:
        """The score that `contamination_filter` gave the task of each row; 0 where it gave none."""
        answer = self.query(_SHARES.format(stage=quoted(self.stage)))
        places = pc.index_in(
            pa.array(self.ids, pa.string()), value_set=answer["experience_id"].combine_chunks()
        )
        return np.asarray(filled(answer["contamination"].take(places), 0.0).to_numpy(), np.float64)

    def query(self, sql: str) -> pa.Table:
        """What a query over the run and `step_rows` gives. Raises StoreError in DuckDB's words."""
        with SqlSession({"run": take_snapshot(self.store.root)}, _SECONDS, _MEMORY, None) as session:
            session.register(STEP_ROWS, session.query(step_rows_query(self.stage, self.explorer, self.step)))
            return session.query(sql)

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
