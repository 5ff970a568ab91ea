"""`trinity-data push RUN FILE`: tasks for a run that reads them from a queue."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trinity_data.cli.arguments import Run
from trinity_data.errors import ConfigError
from trinity_data.runs import resolve_run
from trinity_data.terminal import say


def push(
    run: Run,
    files: Annotated[
        list[Path] | None, typer.Argument(help="Files of tasks: jsonl, json, csv or parquet.")
    ] = None,
    taskset: Annotated[str | None, typer.Option(help="The task set, where several are queues.")] = None,
    close: Annotated[bool, typer.Option("--close", help="Afterwards take no more tasks.")] = False,
) -> None:
    """Push tasks into the queue of a run, which explores them as they come.

    A file is pushed whole or not at all.
    """
    from trinity_data.dataset.reader import DatasetSpec, Source
    from trinity_data.dataset.task_queue import push_tasks

    folder = resolve_run(run)
    if not files and not close:
        raise typer.BadParameter("say what to push: files, --close, or both")
    for file in files or ():
        if not file.is_file():
            raise ConfigError(f"there is no file {str(file)!r}; wanted are jsonl, json, parquet or csv files")
        source = Source(DatasetSpec(str(file), None, "train"))
        num_rows = push_tasks(folder, source.rows(range(source.num_rows)), taskset=taskset)
        say(f"pushed {num_rows:,} tasks of {file}")
    if close:
        push_tasks(folder, (), taskset=taskset, close=True)
        say("closed the queue")
