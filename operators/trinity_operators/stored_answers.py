"""The answers that an operator gave in a run, in the place of the operator: a model that scored the rows then
is not asked again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.schema import EXPERIENCES, filled, values_of
from trinity_operators.base import Filter, FilterResult, Mapper, Operator, float_column

NOT_ASKED = "it was not asked about this row then"


def can_be_stored(operator: Operator) -> bool:
    """Whether scores and decisions are all that it says of a row."""
    if operator.writes_more or not isinstance(operator, Filter | Mapper):
        return False
    return not any(name in EXPERIENCES.names or name == "advantage" for name in operator.writes)


class StoredAnswers(Filter):
    """Of an operator with the same arguments in the run. Rows that it was not asked about are dropped."""

    def __init__(self, operator: Operator) -> None:
        self.name, self.version, self.writes = operator.label, operator.version, operator.writes
        self._ids: Any = pa.array([], pa.string())
        self._decisions, self._outcomes = pa.table({}), pa.table({})

    def show(self, outcomes: pa.Table, decisions: pa.Table) -> None:
        """The stored rows about the experiences that come next."""
        is_mine = (pc.field("operator") == self.name) & (pc.field("version") == self.version)
        self._decisions = decisions.filter(is_mine & (pc.field("row_kind") == "experience"))
        self._ids = self._decisions["row_id"].combine_chunks()
        self._outcomes = outcomes

    def apply(self, rows: pa.Table) -> FilterResult:
        places = pc.index_in(rows["experience_id"], value_set=self._ids)
        stored = self._decisions.take(places)
        kept = np.asarray(filled(stored["kept"], False).to_numpy(zero_copy_only=False), dtype=np.bool_)
        reasons = values_of(filled(stored["reason"], NOT_ASKED))
        return FilterResult(kept, reasons, scores=self._scores(rows["experience_id"]))

    def _scores(self, ids: Any) -> dict[str, Any]:
        places = pc.index_in(ids, value_set=self._outcomes["experience_id"].combine_chunks())
        scores = [dict(each or ()) for each in values_of(self._outcomes["scores"].take(places))]
        table = pa.table(
            {name: pa.array([row.get(name) for row in scores], pa.float64()) for name in self.writes}
        )
        return {name: float_column(table, name) for name in self.writes}
