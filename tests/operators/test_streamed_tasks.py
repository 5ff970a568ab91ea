"""A streamed task set through the task stream: in order, once each, whatever ends the run on the way."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trinity_data.config import FormatConfig, OperatorConfig, TaskPipelineConfig, TasksetConfig
from trinity_data.dataset.reader import dataset_spec
from trinity_data.errors import OperatorError
from trinity_data.status import Status
from trinity_data.store.store import Store
from trinity_operators.base import OperatorSpecError
from trinity_operators.filters import PromptLengthFilter
from trinity_operators.task_chunks import StreamSpec
from trinity_operators.task_execution import plan_execution
from trinity_operators.task_pipeline import TaskStream

NUM_ROWS = 3000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.create_or_open(tmp_path / "store")
    yield opened
    opened.close()


def spec_of(path: Path, *operators: str, shuffle: bool = True, **keys: Any) -> StreamSpec:
    taskset = TasksetConfig(
        name="sums", path=str(path), streaming=True, shuffle=shuffle,
        format=FormatConfig(prompt_key="question", response_key="answer"), **keys,
    )  # fmt: skip
    configs = tuple(OperatorConfig(name=name) for name in operators)
    return StreamSpec(
        taskset, dataset_spec(taskset), TaskPipelineConfig(operators=configs), path, stage="rl", seed=5
    )


def write(folder: Path, count: int = NUM_ROWS) -> list[dict[str, str]]:
    # every third asks what another has asked
    rows = [{"question": f"what is {i - i % 3 // 2}?", "answer": f"{i}"} for i in range(count)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet", row_group_size=100)
    return rows


def with_stream(spec: StreamSpec, store: Store, work: Callable[[TaskStream], Awaitable[Any]]) -> Any:
    async def go() -> Any:
        stream = TaskStream(spec, store, window=64, status=Status("run"))
        try:
            return await asyncio.wait_for(work(stream), 60)
        finally:
            await stream.close()

    return asyncio.run(go())


def take(count: int) -> Callable[[TaskStream], Awaitable[list[str]]]:
    async def work(stream: TaskStream) -> list[str]:
        taken: list[str] = []
        while len(taken) < count and (task := await stream.next()) is not None:
            taken.append(task.task_id)
        return taken

    return work


@pytest.mark.parametrize("shuffle", [True, False])
def test_restarts_anywhere_bring_the_tasks_of_an_uninterrupted_run(
    tmp_path: Path, store: Store, shuffle: bool
) -> None:
    write(tmp_path)
    # one of its operators keeps what it has seen
    spec = spec_of(tmp_path, "exact_duplicate_filter", shuffle=shuffle)
    whole = Store.create_or_open(tmp_path / "whole")
    expected = with_stream(spec, whole, take(NUM_ROWS))
    whole.close()
    assert len(expected) == 2 * NUM_ROWS // 3
    places = random.Random(1)
    for _ in range(6):
        count = places.randrange(NUM_ROWS // 2)
        assert with_stream(spec, store, take(count)) == expected[:count]
    assert with_stream(spec, store, take(NUM_ROWS)) == expected
    rows = store.table("tasks").sort_by("position").to_pylist()
    assert [row["position"] for row in rows] == list(range(NUM_ROWS))
    assert sorted(row["source_row"] for row in rows) == list(range(NUM_ROWS))
    assert store.progress("tasks/rl/sums") == {"rows_read": NUM_ROWS, "exhausted": True}


def test_the_first_tasks_come_before_the_last_rows_are_read(tmp_path: Path, store: Store) -> None:
    rows = [{"question": f"what is {i}?", "answer": f"{i}"} for i in range(NUM_ROWS)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "broken\n")
    spec = spec_of(tmp_path)
    assert len(with_stream(spec, store, take(500))) == 500
    assert store.table("tasks", columns=["task_id"]).num_rows < 1000
    with pytest.raises(OperatorError, match=rf"train.jsonl:{NUM_ROWS + 1}: not JSON"):
        with_stream(spec, store, take(NUM_ROWS))


def test_the_whole_of_a_stream_is_only_there_where_a_limit_ends_it(tmp_path: Path, store: Store) -> None:
    write(tmp_path, 100)
    named = (
        "'sums' is streamed, and only reading all of it tells where it ends; 'document_deduplicator' needs"
    )
    with pytest.raises(OperatorError, match=named):
        with_stream(spec_of(tmp_path, "document_deduplicator"), store, take(1))
    tasks = with_stream(spec_of(tmp_path, "document_deduplicator", limit=30), store, take(100))
    assert len(tasks) == 20 and store.table("tasks").num_rows == 30


def test_a_stream_is_read_by_the_run_itself() -> None:
    operators = [PromptLengthFilter()]
    execution = plan_execution(TaskPipelineConfig(), operators, Path(), streaming=True)
    assert str(execution) == "in process: the task set is streamed"
    with pytest.raises(OperatorSpecError, match=r"the task set is streamed, so that .* found num_process 4"):
        plan_execution(TaskPipelineConfig(num_process=4), operators, Path(), streaming=True)
