"""The state of operators in the ledger: written in the commit of the rows that made it, read by a resume.

It counts only where it is of exactly the rows that the store has outcomes of, and of the same operators. A
branch of an earlier step has none; there the rows are shown again, as to operators that save nothing.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.errors import OperatorError
from trinity_data.schema import filled, values_of
from trinity_data.store.reader import StoreReader
from trinity_operators import trainable
from trinity_operators.base import Operator
from trinity_operators.state_replay import stateful_part

PREFIX = "operators"
"""What the keys begin with."""


class SavedStates:
    """Of the experience operators of one explorer in one stage."""

    def __init__(self, operators: Sequence[Operator], *, stage: str, explorer: str) -> None:
        part = stateful_part(operators)
        self.stateful = {place: each for place, each in enumerate(part) if each.keeps_state}
        self.key, self._id_prefix = f"{PREFIX}/{stage}/{explorer}", f"{explorer}/{stage}/"
        self._labels = [[each.label, each.version] for each in part]
        self._num_rows = self._num_commits = 0

    @property
    def are_saved(self) -> bool:
        """Whether every operator that keeps state gives it."""
        return bool(self.stateful) and all(each.saves_state for each in self.stateful.values())

    def of_commit(self, outcomes: pa.Table) -> dict[str, Any]:
        """What goes into the commit of these outcomes, as its `progress`."""
        if not self.are_saved:
            return {}
        self._num_rows += _num_seen(outcomes)
        values: dict[str, Any] = {}
        for place, operator in self.stateful.items():
            number = f"/{self._num_commits:09d}" if operator.state_grows else ""
            values[f"{self.key}/{place}{number}"] = _encoded(operator)
        self._num_commits += 1
        values[self.key] = {"rows": self._num_rows, "commits": self._num_commits, "operators": self._labels}
        return values

    def load(self, store: StoreReader) -> bool:
        """Gives the operators their state; False where there is none of just the rows that were processed."""
        if not self.are_saved:
            return False
        outcomes = store.table("outcomes", columns=["experience_id", "dropped_by"])
        self._num_rows = _num_seen(
            outcomes.filter(pc.starts_with(outcomes["experience_id"], self._id_prefix))
        )
        header = store.progress(self.key)
        if header is None or (header["operators"], header["rows"]) != (self._labels, self._num_rows):
            return False
        self._num_commits = header["commits"]
        for place, operator in self.stateful.items():
            key = f"{self.key}/{place}"
            if not operator.state_grows:
                _load(operator, store.progress(key))
                continue
            # parts beyond the last commit are of a session before the rows were shown again
            for name, value in store.progress_under(f"{key}/"):
                if int(name.removeprefix(f"{key}/")) < self._num_commits:
                    _load(operator, value)
        return True


def _num_seen(outcomes: pa.Table) -> int:
    """How many of the rows operators have seen."""
    by_others = pc.not_equal(filled(outcomes["dropped_by"], ""), pa.scalar(trainable.OPERATOR))
    return values_of(by_others).count(True)


def _encoded(operator: Operator) -> dict[str, Any]:
    state = operator.state()
    if isinstance(state, bytes):
        return {"bytes": base64.b64encode(state).decode()}
    try:
        json.dumps(state)
    except (TypeError, ValueError) as error:
        raise OperatorError(
            f"{operator.label!r}: state() must return bytes or a JSON value: {error}"
        ) from error
    return {"json": state}


def _load(operator: Operator, value: Any) -> None:
    """Of a value that `_encoded` made."""
    state = base64.b64decode(value["bytes"]) if "bytes" in value else value["json"]
    try:
        operator.load(state)
    # the boundary to code of other people: the message names the operator, whatever it raises
    except Exception as error:
        raise OperatorError(
            f"{operator.label!r} cannot go on from the state that it saved: {type(error).__name__}: {error}"
        ) from error
