from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.operators.scripted_engines import ScriptedEngines
from tests.operators.task_streams import NUMBERED
from trinity_data.config import FormatConfig, OperatorConfig, TaskPipelineConfig, TasksetConfig
from trinity_data.dataset.task_queue import TaskQueue
from trinity_data.errors import ConfigError, OperatorError
from trinity_data.status import Status
from trinity_data.store.store import Store
from trinity_operators.queue_stream import QueueSpec, QueueStream
from trinity_operators.task_engines import TaskEngines, TriedTask

OPERATORS = f"""{NUMBERED}

class Whole(Numbered):
    whole_set = True
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.create_or_open(tmp_path / "store")
    yield store
    store.close()


PROBE = OperatorConfig(name="pass_rate_probe", args={"rollouts": 2, "max_rate": 0.9})


def spec(
    tmp_path: Path, *operators: str, on_bad_row: str = "stop", more: tuple[OperatorConfig, ...] = ()
) -> QueueSpec:
    (tmp_path / "mine.py").write_text(OPERATORS)
    taskset = TasksetConfig.model_validate(
        {
            "name": "q",
            "storage_type": "queue",
            "path": "incoming",
            "format": FormatConfig(prompt_key="q", response_key="a"),
            "default_workflow_type": "math_workflow",
            "on_bad_row": on_bad_row,
        }
    )
    own = [OperatorConfig(name=f"./mine.py:{name}", args={"every": 2}) for name in operators]
    pipeline = TaskPipelineConfig(operators=(*own, *more))
    return QueueSpec(taskset, tmp_path / "incoming", pipeline, tmp_path, "rl")


async def read(
    store: Store, of: QueueSpec, count: int, engines: TaskEngines | None = None
) -> list[str | None]:
    """The prompts of the next tasks of a session of its own; None where the queue has ended."""
    stream = QueueStream(of, store, status=Status(run="r"), engines=engines)
    try:
        async with asyncio.timeout(60):
            tasks = [await stream.next() for _ in range(count)]
        return [None if task is None else task.prompt for task in tasks]
    finally:
        await stream.close()


def push(of: QueueSpec, *questions: str) -> None:
    TaskQueue(of.folder).push([{"q": question, "a": 1} for question in questions])


def test_tasks_come_as_they_are_pushed_until_the_queue_is_closed(tmp_path: Path, store: Store) -> None:
    of = spec(tmp_path)

    async def session() -> list[str | None]:
        reading = asyncio.create_task(read(store, of, 4))
        await asyncio.sleep(0.1)
        push(of, "a", "b")
        push(of, "c")
        TaskQueue(of.folder).close()
        return await reading

    assert asyncio.run(session()) == ["a", "b", "c", None]
    assert store.progress("tasks/rl/q") == {"rows_read": 3, "exhausted": True}
    rows = store.table("tasks", stage="rl")
    assert (rows["source_row"].to_pylist(), rows["position"].to_pylist()) == ([0, 1, 2], [0, 1, 2])


def test_a_session_after_another_goes_on_behind_its_last_row(tmp_path: Path, store: Store) -> None:
    of = spec(tmp_path, "Numbered")
    push(of, "a", "b", "c")
    assert asyncio.run(read(store, of, 2)) == ["a", "c"]
    push(of, "d", "e")
    # the tasks of the first session again, for a sampler that passes over those that were tried
    assert asyncio.run(read(store, of, 3)) == ["a", "c", "e"]
    TaskQueue(of.folder).close()
    assert asyncio.run(read(store, of, 4)) == ["a", "c", "e", None]
    rows = store.table("tasks", stage="rl")
    assert rows["prompt"].to_pylist() == ["a", "b", "c", "d", "e"]
    assert store.table("decisions", stage="rl")["kept"].to_pylist() == [True, False, True, False, True]


def test_a_line_that_cannot_be_read_stops_the_run_or_is_on_record(tmp_path: Path, store: Store) -> None:
    of = spec(tmp_path)
    of.folder.mkdir()
    (of.folder / "00000001.jsonl").write_text('{"q": "a", "a": 1}\n{"q"\n')
    with pytest.raises(ConfigError, match=r"00000001\.jsonl:2: not JSON"):
        asyncio.run(read(store, of, 1))
    assert store.table("tasks", stage="rl").num_rows == 0
    TaskQueue(of.folder).close()
    skipping = spec(tmp_path, on_bad_row="skip")
    assert asyncio.run(read(store, skipping, 2)) == ["a", None]
    assert store.table("tasks", stage="rl")["dropped_by"].to_pylist() == ["", "trainable"]


def test_an_operator_of_the_whole_set_is_refused(tmp_path: Path, store: Store) -> None:
    with pytest.raises(
        OperatorError, match=r"task set 'q': .*Whole.* needs the whole set, which a queue never is"
    ):
        asyncio.run(read(store, spec(tmp_path, "Whole"), 1))


def test_pushed_tasks_are_tried_as_they_come(tmp_path: Path, store: Store) -> None:
    of = spec(tmp_path, more=(PROBE,))
    tried = {"a": TriedTask((1.0, 0.0)), "b": TriedTask((1.0, 1.0)), "c": TriedTask((), "no answer")}
    engines = ScriptedEngines(by_prompt=tried | {"d": TriedTask((0.0, 0.0))})

    async def session() -> list[str | None]:
        reading = asyncio.create_task(read(store, of, 3, engines))
        push(of, "a", "b")
        await asyncio.sleep(0.1)
        push(of, "c")
        push(of, "d")
        TaskQueue(of.folder).close()
        return await reading

    assert asyncio.run(session()) == ["a", "d", None]
    rows = store.table("tasks", stage="rl").sort_by("position").to_pylist()
    assert [dict(row["scores"]).get("pass_rate") for row in rows] == [0.5, 1.0, None, 0.0]
    decisions = store.table("decisions").to_pylist()
    assert [row["reason"] for row in decisions] == ["", "pass rate above 0.9", "error: no answer", ""]
    # a resume takes the stored ones and asks about none of them
    assert asyncio.run(read(store, of, 3, engines)) == ["a", "d", None] and len(engines.asked) == 4
