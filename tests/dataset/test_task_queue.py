from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.small_pipelines import EXPLORING
from trinity_data.config import load_pipeline_file
from trinity_data.dataset.task_queue import TaskQueue, push_tasks
from trinity_data.dataset.text_files import JsonRows
from trinity_data.errors import ConfigError, StoreError

QUEUE = EXPLORING.replace("path: synthetic://gsm8k", "path: incoming, storage_type: queue")


def rows_of(queue: TaskQueue) -> list[dict[str, Any]]:
    files = sorted(queue.folder.glob("*.jsonl"))
    return [row for file in files for row in map(JsonRows([file]).__getitem__, range(len(JsonRows([file]))))]


def run_folder(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "pipeline.yaml"
    file.write_text(text)
    (tmp_path / "config.json").write_text(load_pipeline_file(file).model_dump_json())
    return tmp_path


def test_rows_come_back_in_the_order_of_their_pushes(tmp_path: Path) -> None:
    queue = TaskQueue(tmp_path / "incoming")
    assert [queue.push([{"q": "a"}, {"q": "b"}]), queue.push([]), queue.push([{"q": "c"}])] == [2, 0, 1]
    assert [row["q"] for row in rows_of(queue)] == ["a", "b", "c"]
    assert [file.name for file in sorted(queue.folder.iterdir())] == ["00000001.jsonl", "00000002.jsonl"]


def test_a_closed_queue_takes_no_more(tmp_path: Path) -> None:
    queue = TaskQueue(tmp_path)
    queue.push([{"q": "a"}])
    queue.close()
    queue.close()
    assert queue.is_closed and len(list(tmp_path.iterdir())) == 2
    with pytest.raises(ConfigError, match="the queue is closed and takes no more tasks"):
        queue.push([{"q": "b"}])


def test_a_push_with_a_bad_row_pushes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="row 1: found list; a row is an object"):
        TaskQueue(tmp_path).push([{"q": "a"}, ["b"]])  # type: ignore[list-item]
    assert list(tmp_path.iterdir()) == []


def test_pushes_at_once_are_all_there(tmp_path: Path) -> None:
    def push(who: int) -> None:
        for number in range(10):
            TaskQueue(tmp_path).push([{"who": who, "number": number}])

    threads = [threading.Thread(target=push, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = rows_of(TaskQueue(tmp_path))
    assert [[row["number"] for row in rows if row["who"] == who] for who in range(4)] == [list(range(10))] * 4


def test_tasks_are_pushed_into_the_queue_of_a_run(tmp_path: Path) -> None:
    run = run_folder(tmp_path, QUEUE)
    assert push_tasks(run, [{"question": "2+3?", "answer": "5"}], close=True) == 1
    assert rows_of(TaskQueue(run / "incoming")) == [{"question": "2+3?", "answer": "5"}]
    assert TaskQueue(run / "incoming").is_closed


def test_a_push_that_does_not_fit_the_run_says_why(tmp_path: Path) -> None:
    run = run_folder(tmp_path, QUEUE)
    with pytest.raises(
        ConfigError, match=r"row 1 has no column 'question'; it has q, answer.*nothing was pushed"
    ):
        push_tasks(run, [{"question": "a", "answer": 1}, {"q": "b", "answer": 2}])
    assert not (run / "incoming").exists()
    with pytest.raises(StoreError, match="unknown queue 'tasks'"):
        push_tasks(run, [], taskset="tasks")
    with pytest.raises(StoreError, match="no task set of its is a queue; write storage_type: queue"):
        push_tasks(run_folder(tmp_path, EXPLORING), [])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("incoming,", "incoming, limit: 3,", "taskset.limit: has no effect with storage_type 'queue'"),
        (
            "incoming,",
            "incoming, task_selector: {selector_type: random},",
            "taskset.storage_type: found 'queue', from",
        ),
    ],
)
def test_what_a_queue_cannot_do_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_folder(tmp_path, QUEUE.replace(old, new))
