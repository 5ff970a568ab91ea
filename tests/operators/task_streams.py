"""A task set in a folder, and the stream that reads it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trinity_data.config import FormatConfig, OperatorConfig, TaskPipelineConfig, TasksetConfig
from trinity_data.dataset.reader import DatasetSpec
from trinity_operators.task_chunks import StreamSpec


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
