"""A task set in a folder, and the stream that reads it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any

from trinity_data.config import FormatConfig, OperatorConfig, TaskPipelineConfig, TasksetConfig
from trinity_data.dataset.reader import DatasetSpec
from trinity_data.dataset.task import Task
from trinity_data.status import Status
from trinity_data.store.store import Store
from trinity_operators.task_chunks import StreamSpec
from trinity_operators.task_pipeline import TaskStream

NUMBERED = '''
import numpy as np
from trinity_operators.base import Filter, FilterResult


class Numbered(Filter):
    """Numbers the rows that it has ever seen, and drops the last of so many."""

    keeps_state = True
    reads = ("prompt",)
    seen = 0

    def __init__(self, every: int):
        self.every = every

    def apply(self, rows):
        numbers = np.arange(self.seen, self.seen + rows.num_rows)
        self.seen += rows.num_rows
        return FilterResult((numbers + 1) % self.every != 0, "the last of so many", numbers.astype(float))
'''
"""A file of a user's, with an operator that keeps state."""


def write_rows(folder: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """The rows of the set, with `question` and `answer`."""
    with (folder / "train.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def stream_spec(
    folder: Path, operators: Iterable[OperatorConfig], *, shuffle: bool = True, **pipeline: Any
) -> StreamSpec:
    """Of the set in `folder`, with files of operators, if any; `pipeline` are keys of `task_pipeline`."""
    return StreamSpec(
        taskset=TasksetConfig(
            name="sums",
            path=str(folder),
            shuffle=shuffle,
            format=FormatConfig(prompt_key="question", response_key="answer"),
        ),
        source=DatasetSpec(str(folder), None, "train"),
        pipeline=TaskPipelineConfig(operators=tuple(operators), **pipeline),
        base_dir=folder,
        stage="rl",
        seed=5,
    )


async def tasks_of(spec: StreamSpec, store: Store, *, window: int) -> AsyncIterator[Task]:
    """All tasks of a stream, which is closed behind the last."""
    stream = TaskStream(spec, store, window=window, status=Status("run"))
    try:
        while (task := await asyncio.wait_for(stream.next(), 600)) is not None:
            yield task
    finally:
        await stream.close()
