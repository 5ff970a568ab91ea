"""Chains that begin in process and go on elsewhere, or do not, by what their operators take."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.operators.task_streams import stream_spec, tasks_of, write_rows
from trinity_data.config import OperatorConfig
from trinity_data.dataset.task import Task
from trinity_data.schema import OPERATORS
from trinity_data.store.store import Store
from trinity_operators import task_hand_over
from trinity_operators.task_chunks import Chunk, InProcessChunks, StreamSpec, window_of
from trinity_operators.task_filtering import FilteredTasks
from trinity_operators.task_hand_over import MovingChunks, OperatorCost
from trinity_operators.task_window import Window

NUM_ROWS = 1000


def span(start: int, end: int, *microseconds: float) -> Chunk:
    """Of operators that took so long."""
    rows = [{"operator": "a", "microseconds": each} for each in microseconds]
    none = pa.table({})
    return Chunk(start, end, FilteredTasks(none, none, pa.Table.from_pylist(rows, schema=OPERATORS)))


def test_rows_that_would_take_longer_than_workers_need_to_start_are_worth_them() -> None:
    cost = OperatorCost()
    cost.add(span(0, 64, 64_000_000))  # the first loads what the operators need
    for start in (64, 128):
        cost.add(span(start, start + 64, 48_000, 16_000))  # 1 ms a row
    assert cost.seconds_saved(10**9, 2) == 0  # of three spans nothing is said
    cost.add(span(192, 320, 256_000))
    assert cost.seconds_per_row == pytest.approx(0.001)
    # 20,000 rows take 20 s in process and 10 s in two workers, which need 10 s to start
    assert cost.seconds_saved(20_000, 2) == pytest.approx(0)
    assert cost.seconds_saved(40_000, 2) == pytest.approx(10)
    assert cost.seconds_saved(40_000, 4) == pytest.approx(20)
    assert cost.seconds_saved(10**9, 1) < 0


def spec_of(folder: Path, *operators: str, **pipeline: Any) -> StreamSpec:
    write_rows(folder, ({"question": f"what is {i}?", "answer": f"{i % 7}"} for i in range(NUM_ROWS)))
    return stream_spec(folder, [OperatorConfig(name=name) for name in operators], **pipeline)


def chunks_of(spec: StreamSpec, *, num_rows: int = 256, acknowledged: int | None = None) -> InProcessChunks:
    window = Window(*window_of(spec, [], NUM_ROWS, num_rows=num_rows), acknowledged)
    return InProcessChunks(spec, spec.open_reader(), window)


def test_a_chain_whose_operators_cost_little_stays_in_process_with_100_000_rows(tmp_path: Path) -> None:
    def in_workers(row: int, acknowledged: int) -> InProcessChunks:
        raise AssertionError(f"moved at {row}")

    first = chunks_of(spec_of(tmp_path, "prompt_length_filter"), num_rows=NUM_ROWS)
    # so many rows, of which the first come
    chunks = list(MovingChunks("a stream", first, in_workers, end_row=100_000, num_workers=8))
    assert chunks[-1].end == NUM_ROWS


def test_the_rows_that_are_left_go_on_where_the_others_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_hand_over, "START_SECONDS", 0.0)
    spec = spec_of(tmp_path, "prompt_length_filter")
    expected = [chunk.filtered for chunk in chunks_of(spec, num_rows=NUM_ROWS)]
    moves = list[tuple[int, int]]()

    def in_workers(row: int, acknowledged: int) -> InProcessChunks:
        moves.append((row, acknowledged))
        rest = StreamSpec(**vars(spec) | {"first_row": row})
        return chunks_of(rest, num_rows=NUM_ROWS, acknowledged=acknowledged)

    first = chunks_of(spec, num_rows=NUM_ROWS)
    chunks = MovingChunks("a stream", first, in_workers, end_row=NUM_ROWS, num_workers=2)
    found, ends = [], [0]
    for chunk in chunks:
        assert chunk.start == ends[-1] and chunk.filtered is not None
        ends.append(chunk.end)
        chunks.acknowledge(chunk.end - 1)
        found.append(chunk.filtered)
    assert ends[-1] == NUM_ROWS
    assert moves == [(ends[4], ends[4] - 1)]
    for name in ("tasks", "decisions"):
        tables = [
            pa.concat_tables([each.tables[name] for each in side if each is not None]).drop_columns(
                ["microseconds"] if name == "decisions" else []
            )
            for side in (found, expected)
        ]
        assert tables[0].equals(tables[1]), name


def read_tasks(spec: StreamSpec, folder: Path) -> list[Task]:
    async def read() -> list[Task]:
        return [task async for task in tasks_of(spec, store, window=128)]

    store = Store.create_or_open(folder)
    try:
        return asyncio.run(read())
    finally:
        store.close()


def moves(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Another module's level is as an earlier test of the session left it."""
    return [each.getMessage() for each in caplog.records if each.name == "trinity_operators.task_hand_over"]


@pytest.mark.usefixtures("ray_session")
def test_a_dear_chain_goes_on_in_workers_with_the_same_tasks_in_the_same_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = spec_of(tmp_path, "prompt_length_filter")
    caplog.set_level("INFO", logger="trinity_operators.task_hand_over")
    monkeypatch.setattr(task_hand_over, "START_SECONDS", 0.0)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    expected = read_tasks(spec, tmp_path / "in_process")
    assert not moves(caplog)  # a core for the run leaves one for a worker
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert read_tasks(spec, tmp_path / "moved") == expected
    (move,) = moves(caplog)
    assert "goes on in 2 workers at row " in move
