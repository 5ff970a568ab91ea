"""Writes and answers as other processes send them."""

from __future__ import annotations

import pyarrow as pa
import pytest

from trinity_data.errors import StoreError, StoreLockedError
from trinity_data.schema import rows_to_table
from trinity_data.store.messages import Answer, Write, pack, pack_answer, unpack, unpack_answer
from trinity_data.store.types import Commit, Place, State

ROWS = rows_to_table(
    "experiences",
    [
        {"experience_id": "a", "reward": 0.5, "token_ids": [1, 2]},
        {"experience_id": "b", "reward": None, "token_ids": []},
    ],
)
NUMBERS = rows_to_table("steps", [{"step": 3}])
PARTS = pa.concat_tables([NUMBERS, NUMBERS])


@pytest.mark.parametrize("progress", [{}, {"a": None, "\u00e9": [1, {"b": 0.1}]}], ids=["none", "some"])
def test_a_commit_arrives_as_it_was_sent(progress: dict[str, object]) -> None:
    tables = {"experiences": ROWS, "steps": PARTS, "outcomes": rows_to_table("outcomes", [])}
    commit = Commit(tables=tables, states=[("a", State.DROPPED)], progress=progress)
    sent = Write("client", 7, "submit", (commit,), {}, Place("trainer", 2))
    got = unpack(b"".join(pack(sent)))
    assert got == sent
    assert [type(state) for _, state in got.arguments[0].states] == [State]


@pytest.mark.parametrize("rows", [None, {}, {"steps": NUMBERS}], ids=["none", "empty", "some"])
def test_a_call_arrives_as_it_was_sent(rows: dict[str, pa.Table] | None) -> None:
    options = {"replay": True, "with_rows": rows}
    sent = Write("client", 8, "form_batch", ("grpo", 3, ["a", "b"]), options)
    assert unpack(b"".join(pack(sent))) == sent


@pytest.mark.parametrize("error", [None, StoreError("full"), StoreLockedError("taken")], ids=str)
def test_an_answer_arrives_with_its_error(error: StoreError | None) -> None:
    got = unpack_answer(pack_answer(Answer(error=error)))
    assert (got.value, type(got.error), str(got.error)) == (None, type(error), str(error))
