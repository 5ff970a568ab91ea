"""The state of operators in the ledger: written in the commit of the rows that made it, read by a resume.

It counts only where it is of exactly the rows that the store has, and of the same operators. A branch of an
earlier step has none; there the rows are shown again, as to operators that save nothing.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from trinity_data.errors import OperatorError
from trinity_data.store.protocol import ReadableStore
from trinity_operators.base import Operator, in_words
from trinity_operators.calls import Watch
from trinity_operators.state_replay import stateful_part

EXPERIENCES, TASKS = "operators/experience", "operators/task"
"""What the keys of a pipeline begin with."""

SavedState: TypeAlias = Mapping[str, Any]
"""What an operator's `state` returned, as a JSON value."""


class SavedStates:
    """Of the operators of one pipeline, under `key` and the keys below it."""

    def __init__(self, operators: Sequence[Operator], *, key: str, built_from: object = None) -> None:
        """`built_from`, a JSON value, must be the same for a state to count, as labels and versions must."""
        self.key, self.saving = key, saving(operators)
        labels = [[each.label, each.version] for each in stateful_part(operators)]
        self._operators = json.loads(json.dumps([labels, built_from], default=str))
        self._num_rows = self._num_commits = 0

    def of_commit(self, states: Mapping[int, SavedState], num_rows: int) -> dict[str, Any]:
        """What goes, as its `progress`, into the commit of so many more rows, behind which the operators at
        these positions are in these states.
        """
        if not self.saving:
            return {}
        values = {self._key_of(position, self._num_commits): state for position, state in states.items()}
        self._num_rows += num_rows
        self._num_commits += 1
        header = {"rows": self._num_rows, "commits": self._num_commits, "operators": self._operators}
        return {**values, self.key: header}

    def read(self, store: ReadableStore, num_rows: int) -> dict[int, Iterator[SavedState]] | None:
        """By position what the operators saved, each part once; None where it is not of the first `num_rows`
        rows. Called before the first commit.
        """
        self._num_rows = num_rows
        header = store.progress(self.key) if self.saving else None
        if header is None or (header["operators"], header["rows"]) != (self._operators, num_rows):
            return None
        self._num_commits = header["commits"]
        return {position: self._parts(store, position) for position in self.saving}

    def _parts(self, store: ReadableStore, position: int) -> Iterator[SavedState]:
        # one at a time, because those of 10^6 rows may be some hundred megabytes
        grows = self.saving[position].state_grows
        for number in range(self._num_commits) if grows else (0,):
            state: Any = store.progress(self._key_of(position, number))
            yield state

    def _key_of(self, position: int, commit: int) -> str:
        number = f"/{commit:09d}" if self.saving[position].state_grows else ""
        return f"{self.key}/{position}{number}"


def saving(operators: Sequence[Operator]) -> dict[int, Operator]:
    """By position the operators that keep state, where each of them saves it; none where one does not."""
    stateful = {position: each for position, each in enumerate(operators) if each.keeps_state}
    return stateful if all(each.saves_state for each in stateful.values()) else {}


def encoded(operator: Operator) -> SavedState:
    """The state that the operator is in. Raises OperatorError where it is neither bytes nor a JSON value."""
    try:
        state = operator.state()
        if isinstance(state, bytes):
            return {"bytes": base64.b64encode(state).decode()}
        json.dumps(state)
    except OperatorError:
        raise
    # the boundary to code of other people, as below
    except Exception as error:
        raise OperatorError(
            f"{operator.label!r}: state() must return bytes or a JSON value: {in_words(error)}"
        ) from error
    return {"json": state}


def load_states(
    operators: Sequence[Operator],
    states: Mapping[int, Iterable[SavedState]],
    watch: Watch = lambda _: None,
) -> None:
    """Gives the operators at these positions their state; `watch` is called with what it is at."""
    for position, values in states.items():
        watch(f"operators[{position}]: {operators[position].label!r}, in load")
        for value in values:
            load_state(operators[position], value)
    watch("")


def load_state(operator: Operator, value: SavedState) -> None:
    """Gives it what `encoded` returned. Raises OperatorError where it does not take it."""
    state = base64.b64decode(value["bytes"]) if "bytes" in value else value["json"]
    try:
        operator.load(state)
    # the boundary to code of other people: the message names the operator, whatever it raises
    except Exception as error:
        raise OperatorError(
            f"{operator.label!r} cannot go on from the state that it saved: {in_words(error)}"
        ) from error
