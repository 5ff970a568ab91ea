"""The task stream over Ray Data and a real store. One Ray for all of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.operators.task_streams import stream_spec, write_rows
from trinity_data.config import OperatorConfig
from trinity_data.dataset.task import Task
from trinity_data.errors import OperatorError
from trinity_data.status import Status
from trinity_data.store.store import Store
from trinity_operators.task_chunks import StreamSpec
from trinity_operators.task_filtering import CHUNK_ROWS
from trinity_operators.task_pipeline import TaskStream

pytestmark = pytest.mark.usefixtures("ray_session")

OPERATORS = '''
import os, time
from trinity_operators.base import Expander, Expansion, Filter, FilterResult, Mapper
import numpy as np


class Shout(Mapper):
    reads = ("prompt",)
    writes = ("prompt",)

    def map(self, rows):
        return {"prompt": [text.upper() for text in rows["prompt"].to_pylist()]}


class Breaks(Filter):
    reads = ("prompt",)

    def apply(self, rows):
        raise KeyError("level")


class Counts(Filter):
    """Notes how many rows each worker call saw."""

    reads = ("prompt",)

    def __init__(self, file: str) -> None:
        self.file = file

    def apply(self, rows):
        with open(self.file, "a") as file:
            file.write(f"{rows.num_rows}\\n")
        return FilterResult(np.ones(rows.num_rows, bool), "")


class Numbered(Filter):
    """Keeps every second row that it has ever seen; reads a column of the set's own."""

    keeps_state = True
    reads = ("level",)
    seen = 0

    def apply(self, rows):
        numbers = np.arange(self.seen, self.seen + rows.num_rows)
        self.seen += rows.num_rows
        return FilterResult(numbers % 2 == 0, "odd")


class Unsaved(Numbered):
    reads = ()


class Twice(Expander):
    """Two rows of every third."""

    writes = ("prompt",)

    def expand(self, rows):
        texts = rows["prompt"].to_pylist()
        parts = [[f"{text} a", f"{text} b"] if n % 3 == 0 else [text] for n, text in enumerate(texts)]
        parents = [number for number, own in enumerate(parts) for _ in own]
        return Expansion(parents, {"prompt": [text for own in parts for text in own]})


class Longest(Filter):
    """Keeps the three longest prompts of the set."""

    whole_set = True

    def apply(self, rows):
        lengths = np.array([len(text) for text in rows["prompt"].to_pylist()])
        order = np.argsort(-lengths, kind="stable")
        return FilterResult(np.isin(np.arange(rows.num_rows), order[:3]), "not among the longest", lengths)


class Ends(Filter):
    def apply(self, rows):
        os._exit(0)


class Hangs(Filter):
    def apply(self, rows):
        time.sleep(600)
'''


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.create_or_open(tmp_path / "store")
    yield opened
    opened.close()


def spec_of(
    tmp_path: Path,
    count: int,
    *operators: tuple[str, dict[str, Any]],
    shuffle: bool = True,
    execution: Literal["auto", "in_process", "ray"] = "auto",
) -> StreamSpec:
    rows = [{"question": f"what is {i}?", "answer": f"#### {i}", "kind": "ab"[i % 2]} for i in range(count)]
    write_rows(tmp_path, rows)
    (tmp_path / "own.py").write_text(OPERATORS)
    return stream_spec(
        tmp_path,
        (OperatorConfig(name=name, args=args) for name, args in operators),
        shuffle=shuffle,
        execution=execution,
    )


def with_stream(
    spec: StreamSpec, store: Store, work: Callable[[TaskStream], Awaitable[Any]], *, window: int = 64
) -> Any:
    async def go() -> Any:
        stream = TaskStream(spec, store, window=window, status=Status("run"))
        try:
            return await asyncio.wait_for(work(stream), 60)
        finally:
            await stream.close()

    return asyncio.run(go())


async def all_of(stream: TaskStream) -> list[Task]:
    found: list[Task] = []
    while (task := await stream.next()) is not None:
        found.append(task)
    return found


def take(count: int) -> Callable[[TaskStream], Awaitable[list[Task | None]]]:
    async def work(stream: TaskStream) -> list[Task | None]:
        return [await stream.next() for _ in range(count)]

    return work


def test_dropped_tasks_are_decisions_with_reasons_and_the_others_come_in_order(
    tmp_path: Path, store: Store
) -> None:
    keeps = {"min_len": 11, "max_len": 11}  # what is 10? to what is 99?
    spec = spec_of(tmp_path, 150, ("text_length_filter", keeps), shuffle=False)
    tasks = with_stream(spec, store, all_of)
    assert [task.prompt for task in tasks] == [f"what is {i}?" for i in range(10, 100)]
    rows = store.table("tasks").to_pylist()
    assert [row["source_row"] for row in rows] == [row["position"] for row in rows] == list(range(150))
    assert Counter(row["dropped_by"] for row in rows) == {"": 90, "text_length_filter": 60}
    decisions = store.table("decisions").to_pylist()
    assert len(decisions) == 150
    assert all(d["kept"] or d["reason"] for d in decisions)
    assert {d["row_id"] for d in decisions if d["kept"]} == {task.task_id for task in tasks}
    assert sum(row["rows_out"] for row in store.table("operators").to_pylist()) == 90
    assert store.progress("tasks/rl/sums") == {"rows_read": 150, "exhausted": True}


def test_rows_that_an_operator_makes_come_in_the_place_of_their_parent_and_again_after_a_restart(
    tmp_path: Path, store: Store
) -> None:
    spec = spec_of(tmp_path, 70, ("./own.py:Twice", {}), shuffle=False, execution="in_process")

    def came(chunk_start: int, count: int) -> list[str]:
        ends = [("a", "b") if (i - chunk_start) % 3 == 0 else ("",) for i in range(chunk_start, count)]
        return [f"what is {chunk_start + n}? {end}".strip() for n, own in enumerate(ends) for end in own]

    expected = came(0, 64) + came(64, 70)
    taken = with_stream(spec, store, take(70), window=64)
    again = with_stream(spec, store, all_of)
    assert [task.prompt for task in again] == expected
    assert [task.prompt for task in taken] == expected[:70]
    assert [task.task_id for task in taken] == [task.task_id for task in again][:70]
    assert store.progress("tasks/rl/sums") == {"rows_read": 70, "exhausted": True}


def test_an_operator_of_the_whole_set_sees_all_rows_at_once(tmp_path: Path, store: Store) -> None:
    counts = tmp_path / "counts"
    operators = [("./own.py:Counts", {"file": str(counts)}), ("./own.py:Longest", {})]
    tasks = with_stream(spec_of(tmp_path, 150, *operators, shuffle=False), store, all_of, window=16)
    assert counts.read_text().split() == ["150"]
    assert [task.prompt for task in tasks] == [f"what is {i}?" for i in (100, 101, 102)]


def test_the_first_tasks_arrive_while_most_of_the_set_is_unread(tmp_path: Path, store: Store) -> None:
    spec = spec_of(tmp_path, 40 * CHUNK_ROWS)

    async def work(stream: TaskStream) -> int:
        for _ in range(10):
            assert await stream.next() is not None
        await asyncio.sleep(1)
        return store.table("tasks", columns=["task_id"]).num_rows

    assert with_stream(spec, store, work, window=64) <= 3 * CHUNK_ROWS


def test_dropped_rows_give_their_room_back_so_that_a_strict_filter_does_not_stall(
    tmp_path: Path, store: Store
) -> None:
    keeps = {"min_len": 12, "max_len": 12}  # what is 100? and above: the second chunk and later
    spec = spec_of(tmp_path, 4 * CHUNK_ROWS, ("text_length_filter", keeps), shuffle=False)
    first = with_stream(spec, store, take(1), window=16)
    assert first[0].prompt == "what is 100?"


def test_a_restart_gives_the_same_tasks_and_filters_no_row_twice(tmp_path: Path, store: Store) -> None:
    log = tmp_path / "calls.txt"
    operator = ("./own.py:Counts", {"file": str(log)})
    spec = spec_of(tmp_path, 5 * CHUNK_ROWS, operator, execution="in_process")
    with_stream(spec, store, take(20), window=64)
    read_before = store.table("tasks").num_rows
    assert CHUNK_ROWS <= read_before < 5 * CHUNK_ROWS
    log.unlink()
    tasks = with_stream(spec, store, all_of)
    assert sum(int(line) for line in log.read_text().split()) == 5 * CHUNK_ROWS - read_before
    assert len({task.task_id for task in tasks}) == len(tasks) == 5 * CHUNK_ROWS
    whole = Store.create_or_open(tmp_path / "whole")
    assert [task.task_id for task in with_stream(spec, whole, all_of)] == [task.task_id for task in tasks]
    whole.close()
    log.unlink()
    assert with_stream(spec, store, all_of) == tasks
    assert not log.exists()


def test_a_chunk_is_filtered_at_once_and_written_in_one_commit(tmp_path: Path, store: Store) -> None:
    log = tmp_path / "calls.txt"
    spec = spec_of(
        tmp_path, 2 * CHUNK_ROWS + 5, ("./own.py:Counts", {"file": str(log)}), execution="in_process"
    )
    with_stream(spec, store, all_of)
    assert [int(line) for line in log.read_text().split()] == [CHUNK_ROWS, CHUNK_ROWS, 5]
    assert [row["rows_in"] for row in store.table("operators").to_pylist()] == [CHUNK_ROWS, CHUNK_ROWS, 5]


@pytest.mark.parametrize(
    ("execution", "operators"),
    [
        ("ray", (("exact_duplicate_filter", {}), ("./own.py:Numbered", {}),
                 ("difficulty_filter", {"max_steps": 1}))),
        ("in_process", (("difficulty_filter", {"max_steps": 1}), ("./own.py:Shout", {}),
                        ("exact_duplicate_filter", {"columns": ["level", "prompt"]}))),
    ],
)  # fmt: skip
def test_operators_that_keep_state_go_on_after_each_resume_as_if_nothing_had_happened(
    tmp_path: Path,
    store: Store,
    execution: Literal["in_process", "ray"],
    operators: tuple[tuple[str, dict[str, object]], ...],
) -> None:
    spec = spec_of(tmp_path, 1, *operators, shuffle=True, execution=execution)
    rows = [
        {"question": f"what is {i % 170}?", "answer": "steps\n" * (i % 3) + "#### 1", "level": i % 7}
        for i in range(5 * CHUNK_ROWS)
    ]
    write_rows(tmp_path, rows)
    whole = Store.create_or_open(tmp_path / "whole")
    undisturbed = with_stream(spec, whole, all_of)
    for taken in (5, 40):
        with_stream(spec, store, take(taken), window=32)
        assert store.table("tasks").num_rows < len(rows)
    assert with_stream(spec, store, all_of) == undisturbed
    columns = ["row_id", "operator", "position", "kept", "reason"]
    assert store.table("decisions", columns=columns).equals(whole.table("decisions", columns=columns))
    whole.close()


def test_an_operator_that_ends_its_process_is_named_and_not_tried_again(tmp_path: Path, store: Store) -> None:
    spec = spec_of(tmp_path, 3, ("./own.py:Ends", {}))
    with pytest.raises(
        OperatorError,
        match=r"stage 'rl': operators\[0\]: 'Ends', at 3 rows, the first of them '\w+', ended its process",
    ):
        with_stream(spec, store, take(1))


def test_an_operator_that_hangs_is_named_after_its_time(tmp_path: Path, store: Store) -> None:
    spec = spec_of(tmp_path, 3, ("./own.py:Hangs", {}))
    spec = replace(spec, pipeline=spec.pipeline.model_copy(update={"operator_timeout": 0.5}))
    with pytest.raises(
        OperatorError,
        match=r"operators\[0\]: 'Hangs', at 3 rows, .* did not end within `operator_timeout`, 0.5 s",
    ):
        with_stream(spec, store, take(1))


def test_a_mapper_that_changes_the_prompt_changes_what_is_said_to_the_model(
    tmp_path: Path, store: Store
) -> None:
    spec = spec_of(tmp_path, 3, ("./own.py:Shout", {}), shuffle=False, execution="in_process")
    tasks = with_stream(spec, store, all_of)
    assert [task.prompt for task in tasks] == ["WHAT IS 0?", "WHAT IS 1?", "WHAT IS 2?"]
    assert [task.messages[-1]["content"] for task in tasks] == [task.prompt for task in tasks]
    assert store.table("tasks")["prompt"].to_pylist() == [task.prompt for task in tasks]


def test_an_operator_that_fails_in_the_worker_is_one_clear_error(tmp_path: Path, store: Store) -> None:
    spec = spec_of(tmp_path, 3, ("./own.py:Breaks", {}))
    with pytest.raises(OperatorError) as caught:
        with_stream(spec, store, take(1))
    assert str(caught.value) == (
        "the task stream of stage 'rl': operators[0]: 'Breaks' failed on 3 rows: KeyError: 'level'"
    )
    assert store.table("tasks").num_rows == 0


def test_files_that_cannot_be_read_are_one_clear_error(tmp_path: Path, store: Store) -> None:
    spec = spec_of(tmp_path, 3)
    (tmp_path / "train.jsonl").write_text('{"quest": "a"}\n')
    with pytest.raises(
        OperatorError, match=r"the task stream of stage 'rl': taskset 'sums': .* no column 'question'"
    ):
        with_stream(spec, store, take(1))


def test_an_empty_set_ends_at_once(tmp_path: Path, store: Store) -> None:
    spec = spec_of(tmp_path, 3, ("text_length_filter", {"min_len": 1000, "max_len": 2000}))
    assert with_stream(spec, store, all_of) == []
    assert store.table("tasks").num_rows == 3


def test_odd_rows_pass_the_stream_as_they_are_or_are_left_out_on_record(tmp_path: Path, store: Store) -> None:
    spec = spec_of(tmp_path, 1, ("exact_duplicate_filter", {"columns": ["reward"]}), shuffle=False)
    rows: list[dict[str, Any]] = [
        {"question": "a", "answer": 0, "reward": 1, "advantage": "high"},
        {"question": "b", "answer": 123456789012345678901234567890, "reward": "x", "advantage": None},
        {"question": "c", "answer": None, "reward": 2},
        {"question": [{"role": "user"}], "answer": 1, "reward": 3},
        {"question": "e", "answer": 2.5, "reward": 1},
    ]
    write_rows(tmp_path, rows)
    tasks = with_stream(spec, store, all_of)
    assert [(task.prompt, task.answer) for task in tasks] == [
        ("a", "0"),
        ("b", "123456789012345678901234567890"),
    ]
    assert [dict(task.columns) for task in tasks] == rows[:2]
    dropped = {
        row["row_id"]: row["reason"] for row in store.table("decisions").to_pylist() if not row["kept"]
    }
    by_prompt = {row["source_row"]: dropped.get(row["task_id"]) for row in store.table("tasks").to_pylist()}
    assert by_prompt == {
        0: None,
        1: None,
        2: "column 'answer' holds no answer",
        3: "question[0] has no content",
        4: "same reward as an earlier row",
    }


def test_a_broken_line_stops_the_stream_with_its_file_and_line(tmp_path: Path, store: Store) -> None:
    spec = spec_of(tmp_path, 3, shuffle=False)
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('{"question": \n')
    with pytest.raises(OperatorError, match=r"train\.jsonl:4: not JSON: "):
        with_stream(spec, store, all_of)


def rewrite(tmp_path: Path, count: int, **changes: str) -> None:
    """The set anew with so many rows, some of which ask something else."""
    write_rows(
        tmp_path,
        [{"question": changes.get(f"row_{i}", f"what is {i}?"), "answer": f"#### {i}"} for i in range(count)],
    )


@pytest.mark.parametrize("shuffle", [True, False])
def test_of_a_set_that_changes_on_the_way_every_row_is_read_once(
    tmp_path: Path, store: Store, shuffle: bool
) -> None:
    spec = spec_of(tmp_path, 200, shuffle=shuffle)
    with_stream(spec, store, take(20), window=64)
    before = store.table("tasks").sort_by("position").to_pylist()
    unread = next(i for i in range(200) if i not in {row["source_row"] for row in before})
    read = before[0]["source_row"]
    # two sessions, between which the set grows twice, and two of its rows say something else
    rewrite(tmp_path, 250, **{f"row_{unread}": "and now?", f"row_{read}": "too late?"})
    with_stream(spec, store, take(100), window=64)
    rewrite(tmp_path, 300, **{f"row_{unread}": "and now?", f"row_{read}": "too late?"})
    tasks = with_stream(spec, store, all_of)
    rows = store.table("tasks").sort_by("position").to_pylist()
    assert rows[: len(before)] == before
    assert sorted(row["source_row"] for row in rows) == list(range(300))
    assert [row["position"] for row in rows] == list(range(300))
    assert [row["task_id"] for row in rows] == [task.task_id for task in tasks]
    prompts = {row["source_row"]: row["prompt"] for row in rows}
    assert prompts[unread] == "and now?" and prompts[read] == f"what is {read}?"
    assert store.progress("tasks/rl/sums") == {"rows_read": 300, "exhausted": True}


def test_an_operator_that_keeps_state_refuses_a_set_without_rows_that_it_saw(
    tmp_path: Path, store: Store
) -> None:
    spec = spec_of(tmp_path, 200, ("./own.py:Unsaved", {}))
    with_stream(spec, store, take(20), window=64)
    rewrite(tmp_path, 150)
    with pytest.raises(
        OperatorError, match=r"task set 'sums': .* has changed, and rows that were read are gone"
    ):
        with_stream(spec, store, all_of)
