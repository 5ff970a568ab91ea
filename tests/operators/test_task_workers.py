"""Task operators in several workers: the same rows as in process, and what is lost when one ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
from ray._private.state import actors
from ray.util.placement_group import placement_group_table

from tests.operators.task_streams import NUMBERED, stream_spec, write_rows
from trinity_data.config import OperatorConfig
from trinity_data.dataset.task import Task
from trinity_data.errors import OperatorError
from trinity_data.nodes import ray_folder
from trinity_data.processes import descendants
from trinity_data.status import Status
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_operators import remote_operators
from trinity_operators.remote_operators import OperatorActor, OperatorPart
from trinity_operators.task_chunks import StreamSpec
from trinity_operators.task_pipeline import TaskStream, stored_tasks

pytestmark = pytest.mark.usefixtures("ray_session")

NUM_ROWS = 700

OPERATORS = (
    NUMBERED
    + '''
import os, time, random
from trinity_operators.base import Expander, Expansion, Mapper


class Slow(Mapper):
    """Of random slowness."""

    writes = ("prompt",)

    def map(self, rows):
        time.sleep(random.uniform(0, 0.02))
        return {"prompt": [text + "!" for text in rows["prompt"].to_pylist()]}


class Saved(Numbered):
    """Goes on from what it saved."""

    def state(self):
        return self.seen

    def load(self, state):
        self.seen = state


class Twice(Expander):
    """Two rows of those that end in 5."""

    writes = ("prompt",)

    def expand(self, rows):
        texts = rows["prompt"].to_pylist()
        parts = [[text, text + " again"] if "5?" in text else [text] for text in texts]
        parents = [number for number, own in enumerate(parts) for _ in own]
        return Expansion(parents, {"prompt": [text for own in parts for text in own]})


class Loaded(Filter):
    """Notes each time that it is prepared and closed; keeps what is shorter than a chunk is long."""

    slow_start = True
    reads = ("prompt",)

    def __init__(self, file: str) -> None:
        self.file = file

    def prepare(self):
        self.note("prepare")

    def close(self):
        self.note("close")

    def apply(self, rows):
        self.note("apply")
        return FilterResult(np.array([len(text) % 3 > 0 for text in rows["prompt"].to_pylist()]), "length")

    def note(self, what):
        with open(self.file, "a") as file:
            file.write(f"{os.getpid()} {what}\\n")


class CannotLoad(Loaded):
    def prepare(self):
        raise KeyError("weights")


class Ends(Loaded):
    def apply(self, rows):
        os._exit(3)


class Hangs(Loaded):
    def apply(self, rows):
        time.sleep(600)


class Dear(Filter):
    num_gpus = 1

    def apply(self, rows):
        raise AssertionError
'''
)

CHAIN = (
    ("./own.py:Slow", {}),
    ("difficulty_filter", {"max_steps": 4}),
    ("./own.py:Numbered", {"every": 7}),
    ("./own.py:Twice", {}),
    ("exact_duplicate_filter", {}),
    ("prompt_length_filter", {"min_length": 2}),
)


def spec_of(
    tmp_path: Path, *operators: tuple[str, dict[str, Any]], num_rows: int = NUM_ROWS, **pipeline: Any
) -> StreamSpec:
    """One row of seven has the question of an earlier one."""
    write_rows(
        tmp_path,
        (
            {"question": question(i, num_rows), "answer": "step\n" * (i % 6) + f"#### {i}", "level": i % 5}
            for i in range(num_rows)
        ),
    )
    (tmp_path / "own.py").write_text(OPERATORS)
    configs = [OperatorConfig(name=name, args=args) for name, args in operators]
    return stream_spec(tmp_path, configs, **pipeline)


def question(number: int, num_rows: int = NUM_ROWS) -> str:
    return f"what is {number % (num_rows * 6 // 7)}?"


def read_tasks(
    spec: StreamSpec,
    folder: Path,
    *,
    window: int = 256,
    note: Callable[[str], object] | None = None,
    pause: float = 0,
) -> list[Task]:
    """Reads all of the stream into the store at `folder`, which may hold a part of it.

    `note` is called with each task that was not there, and behind each it pauses.
    """

    async def read() -> list[Task]:
        stream = TaskStream(spec, store, window=window, status=Status("run"))
        tasks, num_stored = list[Task](), len(stored_tasks(store, spec))
        try:
            while (task := await asyncio.wait_for(stream.next(), 600)) is not None:
                tasks.append(task)
                if len(tasks) > num_stored:
                    if note is not None:
                        note(task.task_id)
                    await asyncio.sleep(pause)
        finally:
            await stream.close()
            await asyncio.to_thread(nothing_left)
        return tasks

    store = Store.create_or_open(folder)
    try:
        return asyncio.run(read())
    finally:
        store.close()


def nothing_left() -> None:
    """Waits until no process, placement group or CPU belongs to a stream that has ended."""
    end = time.monotonic() + 60
    while left := stream_workers() + [
        group for group in placement_group_table().values() if group["state"] != "REMOVED"
    ]:
        assert time.monotonic() < end, left
        time.sleep(0.05)
    while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
        assert time.monotonic() < end, ray.available_resources()
        time.sleep(0.05)


def stored(folder: Path, table: str) -> pa.Table:
    """Without what depends on the clock."""
    store = Store.create_or_open(folder)
    try:
        rows = store.table(table)
    finally:
        store.close()
    return rows.drop_columns([name for name in ("microseconds",) if name in rows.column_names])


def rows_read(folder: Path) -> int:
    store = Store.create_or_open(folder)
    try:
        return int((store.progress("tasks/rl/sums") or {}).get("rows_read", 0))
    finally:
        store.close()


def test_in_process_and_in_one_or_four_workers_tasks_and_decisions_are_the_same(tmp_path: Path) -> None:
    expected = read_tasks(spec_of(tmp_path, *CHAIN, execution="in_process"), tmp_path / "in_process")
    assert 300 < len(expected) < NUM_ROWS
    for count in (1, 4):
        folder = tmp_path / f"ray_{count}"
        spec = spec_of(tmp_path, *CHAIN, execution="ray", num_process=count)
        assert read_tasks(spec, folder) == expected
        for table in ("tasks", "decisions"):
            assert stored(folder, table).equals(stored(tmp_path / "in_process", table)), (count, table)


def test_workers_that_ray_does_not_start_are_named_after_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_operators, "START_SECONDS", 0.0)
    spec_of(tmp_path)
    loaded = OperatorConfig(name="./own.py:Loaded", args={"file": str(tmp_path / "calls")}, concurrency=2)
    with pytest.raises(OperatorError, match=r"operators\[0\]: 'Loaded': its workers did not start in 0 s"):
        read_tasks(stream_spec(tmp_path, [loaded]), tmp_path / "store")


def test_an_operator_with_a_slow_start_is_prepared_and_closed_once_in_each_of_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.data import DataContext  # takes seconds

    # of another use of Ray Data in the process
    options = DataContext.get_current()
    monkeypatch.setattr(options.execution_options, "preserve_order", True)
    before = options.copy()
    calls = tmp_path / "calls"
    spec_of(tmp_path)
    loaded = OperatorConfig(name="./own.py:Loaded", args={"file": str(calls)}, concurrency=2)
    tasks = read_tasks(stream_spec(tmp_path, [loaded]), tmp_path / "store")
    assert len(tasks) == sum(len(question(i)) % 3 > 0 for i in range(NUM_ROWS))
    by_process: dict[str, list[str]] = {}
    for line in calls.read_text().splitlines():
        pid, what = line.split()
        by_process.setdefault(pid, []).append(what)
    assert len(by_process) == 2
    for whats in by_process.values():
        assert whats[0] == "prepare" and whats[-1] == "close"
        assert set(whats[1:-1]) <= {"apply"}
    assert sum(whats.count("apply") for whats in by_process.values()) == 11  # 700 rows in chunks of 64
    assert DataContext.get_current() == before


def test_a_stream_whose_window_is_killed_fails_and_has_lost_no_row(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, ("prompt_length_filter", {}), num_process=2)

    def kill(_: str) -> None:
        for pid in stream_workers(b"ray::WindowActor"):
            os.kill(pid, signal.SIGKILL)

    named = "stage 'rl': the process of its window ended or was killed"
    with pytest.raises(OperatorError, match=named):
        read_tasks(spec, tmp_path / "store", window=64, note=kill)
    assert 0 < rows_read(tmp_path / "store") < NUM_ROWS
    tasks = read_tasks(spec, tmp_path / "store")
    assert len({task.task_id for task in tasks}) == len(tasks) == NUM_ROWS


@pytest.mark.parametrize(
    ("name", "timeout", "message"),
    [
        ("CannotLoad", 60, r"operators\[1\]: 'CannotLoad' cannot be prepared: KeyError: 'weights'"),
        ("Ends", 60, r"operators\[1\]: 'Ends', at 64 rows, the first of them '\w+', ended its process"),
        ("Hangs", 0.5, r"operators\[1\]: 'Hangs', at 64 rows, .* did not end within `operator_timeout`, 0.5"),
    ],
)  # fmt: skip
def test_an_operator_that_fails_in_a_worker_of_its_own_is_named(
    tmp_path: Path, name: str, timeout: float, message: str
) -> None:
    operators = (("prompt_length_filter", {}), (f"./own.py:{name}", {"file": str(tmp_path / "calls")}))
    spec = spec_of(tmp_path, *operators, operator_timeout=timeout)
    with pytest.raises(OperatorError, match=message):
        read_tasks(spec, tmp_path / "store")


def test_a_gpu_that_is_not_there_is_named_before_any_process_starts(tmp_path: Path) -> None:
    before = actors()
    with pytest.raises(
        OperatorError, match=r"operators\[0\]: 'Dear' declares num_gpus: 1 for each of 1 workers; Ray has 0"
    ):
        read_tasks(spec_of(tmp_path, ("./own.py:Dear", {})), tmp_path / "store")
    # one that were still to start would be seen in the next test
    assert actors().keys() == before.keys()


def test_a_chunk_of_which_no_row_comes_to_an_operator_in_order_lets_the_next_in(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OPERATORS)
    part = OperatorPart("./own.py:Numbered", {"every": 7}, 0, tmp_path, 60, id_column="task_id", first_turn=0)
    actor, rows = OperatorActor(part), pa.table({"task_id": ["a", "b"], "prompt": ["x", "y"]})
    actor.prepare()
    for turn in (3, 1, 2):  # as many as come; none of them waits
        actor.skip(turn)
    for turn, numbers in ((0, [0.0, 1.0]), (4, [2.0, 3.0])):
        result, error = actor.apply(rows, turn)
        assert (error, result.value.tolist()) == ("", numbers)
    actor.close()


def stream_workers(*names: bytes) -> list[int]:
    """The processes that read, those of operators with workers of their own, and the window's; or of these
    those with such a title.
    """
    names = names or (b"ray::ReadTaskSource", b"ray::OperatorActor", b"ray::_WorkerTask", b"ray::WindowActor")
    found = list[int]()
    for pid in descendants(os.getpid()):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if title.startswith(names):
            found.append(pid)
    return found


def test_a_worker_that_is_killed_is_replaced_within_the_run_and_no_row_is_lost_or_filtered_twice(
    tmp_path: Path,
) -> None:
    expected = read_tasks(spec_of(tmp_path, *CHAIN, execution="in_process"), tmp_path / "whole")
    spec = spec_of(tmp_path, *CHAIN, num_process=2)
    store = Store.create_or_open(tmp_path / "store")

    async def read() -> list[Task]:
        stream = TaskStream(spec, store, window=64, status=Status("run"), max_restarts=5)
        tasks = [await stream.next() for _ in range(8)]
        # the file of a worker that is killed goes with Ray
        assert list(ray_folder().glob("trinity-at-work-*"))
        os.kill(min(stream_workers(b"ray::ReadTaskSource", b"ray::_WorkerTask")), signal.SIGKILL)
        try:
            while (task := await asyncio.wait_for(stream.next(), 120)) is not None:
                tasks.append(task)
        finally:
            await stream.close()
            await asyncio.to_thread(nothing_left)
        return tasks

    assert asyncio.run(read()) == expected
    store.commit(Commit())  # after the events
    events = store.table("events").to_pylist()
    assert [event["kind"] for event in events] == ["stream_died", "stream_restarted"]
    assert re.fullmatch(r"task stream sums: behind \d+ stored rows", events[1]["message"])
    store.close()
    for table in ("tasks", "decisions"):
        assert stored(tmp_path / "store", table).equals(stored(tmp_path / "whole", table)), table
