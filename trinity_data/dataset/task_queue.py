"""A folder that takes tasks while a run goes on.

Each push is one file of JSON lines, numbered from 1 and never changed; an empty file is the end. A row's
number counts the rows of the files before its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from trinity_data.atomic import new_file
from trinity_data.config import TasksetConfig
from trinity_data.config.run import recorded_run
from trinity_data.dataset.row import columns_text
from trinity_data.dataset.task import missing_columns
from trinity_data.errors import ConfigError, StoreError, unknown_name


class TaskQueue:
    """Any number of processes may push; the tasks come in the order in which their pushes ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, number: int) -> Path:
        """Of a push, from 1; it exists once the push has ended, and is empty where it closed the queue."""
        return self.folder / f"{number:08d}.jsonl"

    def push(self, rows: Iterable[Mapping[str, Any]]) -> int:
        """Puts the rows behind those that are there, durably, all or none, and returns their number.

        Raises ConfigError where the queue is closed, or a row is no object.
        """
        lines = list[str]()
        for row in rows:
            if not isinstance(row, Mapping):
                raise ConfigError(
                    f"row {len(lines)}: found {type(row).__name__}; a row is an object of columns"
                )
            lines.append(f"{columns_text(row)}\n")
        if lines:
            self._append("".join(lines).encode())
        return len(lines)

    def close(self) -> None:
        """Ends the queue: the run goes on until its tasks are used up. Does nothing where it has ended."""
        if not self.is_closed:
            self._append(b"")

    @property
    def is_closed(self) -> bool:
        last = self._next_number() - 1
        return last > 0 and not self.file(last).stat().st_size

    def _append(self, content: bytes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        while True:
            if self.is_closed:
                raise ConfigError(f"{self.folder}: the queue is closed and takes no more tasks")
            try:
                with new_file(self.file(self._next_number())) as partial:
                    partial.write_bytes(content)
                return
            except FileExistsError:  # another process was faster
                continue

    def _next_number(self) -> int:
        return next(number for number in count(1) if not self.file(number).exists())


def queue_folder(config: TasksetConfig, job_dir: Path) -> Path:
    """A relative path is one in the run's folder, where `push` finds it from every working directory."""
    return job_dir / Path(config.path).expanduser()


def push_tasks(
    run: Path, rows: Iterable[Mapping[str, Any]], *, taskset: str | None = None, close: bool = False
) -> int:
    """Pushes tasks into a queue of a run, and returns their number.

    Raises StoreError for a run without such a queue, ConfigError for rows that lack a column of its format.
    """
    config = _queue_of(run, taskset)
    queue, checked = TaskQueue(queue_folder(config, run)), list(rows)
    for number, row in enumerate(checked):
        problems = missing_columns(config, list(row))
        if problems:
            raise ConfigError(f"row {number} {problems[0][1]}; nothing was pushed")
    num_rows = queue.push(checked)
    if close:
        queue.close()
    return num_rows


def _queue_of(run: Path, name: str | None) -> TasksetConfig:
    tasksets = [taskset for stage in recorded_run(run).stages for taskset in stage.explored_tasksets]
    queues = {taskset.name: taskset for taskset in tasksets if taskset.storage_type == "queue"}
    if not queues:
        raise StoreError(
            f"{run}: no task set of its is a queue; write storage_type: queue in its pipeline file"
        )
    if name is None and len(queues) > 1:
        raise StoreError(
            f"{run}: found several queues, {', '.join(queues)}; say which with a task set's name"
        )
    if name is not None and name not in queues:
        raise StoreError(f"{run}: {unknown_name('queue', name, queues)}")
    return queues[name or next(iter(queues))]
