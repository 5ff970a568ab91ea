"""Task operators that save their state go on from it after a stop, in process and in workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.operators.task_streams import stream_spec, write_rows
from trinity_data.config import OperatorConfig
from trinity_data.errors import OperatorError
from trinity_data.status import Status
from trinity_data.store.branch import branch_store
from trinity_data.store.snapshot import at_step
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_operators.remote_operators import OperatorActor, OperatorPart
from trinity_operators.task_chunks import StreamSpec, turn_of
from trinity_operators.task_filtering import CHUNK_ROWS
from trinity_operators.task_pipeline import TaskStream

OPERATORS = '''
import numpy as np
from trinity_operators.base import Filter, FilterResult, Mapper


class Parts(Filter):
    """Drops every third chunk of the set whole."""

    reads = ("number",)

    def apply(self, rows):
        return FilterResult(rows["number"].to_numpy() // 64 % 3 != 2, "third chunk")


class Counted(Mapper):
    """Its state is a value. Notes the numbers of the rows that it is given."""

    keeps_state = True
    reads, writes = ("number",), ("seen",)

    def __init__(self, file: str, step: int = 1) -> None:
        self.file, self.step, self.seen = file, step, 0

    def state(self):
        return {"seen": self.seen}

    def load(self, state):
        self.seen = state["seen"]

    def map(self, rows):
        with open(self.file, "a") as file:
            file.writelines(f"{number}\\n" for number in rows["number"].to_pylist())
        numbers = self.seen + self.step * np.arange(rows.num_rows, dtype=float)
        self.seen += self.step * rows.num_rows
        return {"seen": numbers}


class Unsaved(Counted):
    state, load = Filter.state, Filter.load


class Broken(Counted):
    def state(self):
        raise KeyError("seen")
'''


def spec_of(folder: Path, *names: str, num_rows: int = 1000, step: int = 1, **pipeline: Any) -> StreamSpec:
    """One row of seven asks what an earlier one has asked."""
    write_rows(
        folder,
        (
            {"question": f"what is {i % max(1, num_rows * 6 // 7)}?", "answer": "1", "number": i}
            for i in range(num_rows)
        ),
    )
    (folder / "own.py").write_text(OPERATORS)
    args = {"file": str(folder / "given"), "step": step}
    operators = (
        OperatorConfig(name="./own.py:Parts"),
        *(OperatorConfig(name=f"./own.py:{name}", args=args) for name in names),
        # its state grows
        OperatorConfig(name="exact_duplicate_filter"),
    )
    return stream_spec(folder, operators, shuffle=False, **pipeline)


def session(spec: StreamSpec, root: Path, count: int = 10**9, *, window: int = 256) -> int:
    """Takes so many tasks, or all; returns how many rows were read before."""

    async def take() -> int:
        stream = TaskStream(spec, store, window=window, status=Status("run"))
        before = int((store.progress(stream.key) or {"rows_read": 0})["rows_read"])
        try:
            for _ in range(count):
                if await asyncio.wait_for(stream.next(), 120) is None:
                    break
        finally:
            await stream.close()
        return before

    store = Store.create_or_open(root)
    try:
        return asyncio.run(take())
    finally:
        store.close()


def stored(root: Path) -> list[pa.Table]:
    """Without what depends on the clock."""
    store = Store.create_or_open(root)
    try:
        return [store.table("tasks"), store.table("decisions").drop_columns(["microseconds"])]
    finally:
        store.close()


def given(folder: Path) -> list[int]:
    """The rows that `Counted` was given since this was last called."""
    file = folder / "given"
    numbers = [int(line) for line in file.read_text().split()] if file.exists() else []
    file.unlink(missing_ok=True)
    return numbers


@pytest.mark.parametrize(
    ("where", "counts"),
    [
        ({"execution": "in_process"}, (30, 900, 4000)),
        ({"execution": "ray"}, (30, 4000)),  # the operators are beside the reading, in its one worker
        ({"num_process": 2}, (30, 900, 4000)),
    ],
)
def test_sessions_leave_what_one_leaves_and_show_no_row_again(
    tmp_path: Path, where: dict[str, Any], counts: tuple[int, ...], ray_session: None
) -> None:
    session(spec_of(tmp_path, "Counted", num_rows=4000, execution="in_process"), tmp_path / "whole")
    all_rows = given(tmp_path)
    assert all_rows == [i for i in range(4000) if i // 64 % 3 != 2]
    starts, spec = list[int](), spec_of(tmp_path, "Counted", num_rows=4000, **where)
    for count in counts:
        # so wide that spans have several chunks, and so narrow that no session but the last reads all
        starts.append(before := session(spec, tmp_path / "parts", count, window=1024))
        numbers = given(tmp_path)
        assert numbers == [i for i in all_rows if i >= before][: len(numbers)]
    assert starts[0] == 0 and sorted({*starts, 4000}) == [*starts, 4000]
    assert stored(tmp_path / "parts") == stored(tmp_path / "whole")


def test_what_has_no_saved_state_is_shown_all_rows_again(tmp_path: Path) -> None:
    root = tmp_path / "store"
    for first, then in (("Unsaved", "Unsaved"), ("Counted", "Unsaved")):
        spec = spec_of(tmp_path, first, execution="in_process")
        session(spec, root / first, 30)
        given(tmp_path)
        assert session(spec_of(tmp_path, then, execution="in_process"), root / first) > 0
        assert given(tmp_path)[0] == 0


def test_the_state_of_an_operator_with_other_arguments_is_not_used(tmp_path: Path) -> None:
    session(spec_of(tmp_path, "Counted", execution="in_process"), tmp_path / "store", 30)
    given(tmp_path)
    session(spec_of(tmp_path, "Counted", step=2, execution="in_process"), tmp_path / "store")
    assert given(tmp_path)[0] == 0


def test_a_branch_of_an_earlier_step_is_shown_its_rows_again(
    tmp_path: Path, group: Callable[..., pa.Table], outcomes: Callable[..., pa.Table]
) -> None:
    spec, root = spec_of(tmp_path, "Counted", execution="in_process"), tmp_path / "run" / "store"
    session(spec, root, 30)
    store = Store.create_or_open(root)
    rows = group(1)
    store.commit(Commit(tables={"experiences": rows, "outcomes": outcomes(rows)}))
    store.form_batch("rl", 1, store.pending("rl"))
    store.close()
    session(spec, root)
    given(tmp_path)
    branch_store(root, tmp_path / "branch" / "store", at_step(root, 1))
    before = session(spec, tmp_path / "branch" / "store", 10**9)
    assert 0 < before < 1000 and given(tmp_path) == [i for i in range(1000) if i // 64 % 3 != 2]
    assert stored(tmp_path / "branch" / "store") == stored(root)


def test_rows_that_are_gone_are_not_missed(tmp_path: Path) -> None:
    session(spec_of(tmp_path, "Counted", execution="in_process"), tmp_path / "store", 100)
    fewer = spec_of(tmp_path, "Counted", num_rows=100, execution="in_process")
    assert session(fewer, tmp_path / "store") > 100


@pytest.mark.parametrize("num_process", [1, 2])
def test_state_that_cannot_be_saved_names_the_operator(
    tmp_path: Path, num_process: int, ray_session: None
) -> None:
    spec = spec_of(tmp_path, "Broken", num_rows=100, num_process=num_process)
    named = r"stage 'rl': 'Broken': state\(\) must return bytes or a JSON value: KeyError: 'seen'"
    with pytest.raises(OperatorError, match=named):
        session(spec, tmp_path / "store")


def actor(folder: Path) -> OperatorActor:
    """In this process, and prepared; its turns begin at 0."""
    spec_of(folder, "Counted", num_rows=1)
    args = {"file": str(folder / "given")}
    made = OperatorActor(OperatorPart("./own.py:Counted", args, 0, folder, 60, "task_id", first_turn=0))
    description, _ = made.prepare()
    assert description is not None and description.saves_state
    return made


def test_the_state_behind_a_span_is_that_of_its_last_turn_whatever_comes_before_it_is_asked_for(
    tmp_path: Path, ray_session: None
) -> None:
    counted, rows = actor(tmp_path), pa.table({"task_id": ["a", "b"], "number": [0, 1]})
    # a later span ends where no row comes as far as the operator, and is there first
    counted.skip(2, then_saved=True)
    for turn in (0, 1, 3):
        counted.apply(rows, turn, then_saved=turn == 0)
    assert [counted.state_after(turn)[0] for turn in (2, 0)] == [{"json": {"seen": n}} for n in (4, 2)]
    assert counted.states == {}
    assert counted.load([{"json": {}}]) == (
        "'Counted' cannot go on from the state that it saved: KeyError: 'seen'"
    )
    counted.close()


@pytest.mark.parametrize(("start", "turn"), [(0, 0), (CHUNK_ROWS, 1), (200, 4), (200 + CHUNK_ROWS, 5)])
def test_turns_behind_a_short_chunk_have_numbers_of_their_own(start: int, turn: int) -> None:
    # a set of 200 rows, of which the last 8 are turn 3, has grown
    assert turn_of(start) == turn
