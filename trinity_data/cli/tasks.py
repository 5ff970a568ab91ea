"""`trinity-data tasks FILE`: the task pipeline of a pipeline file, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trinity_data.cli.arguments import Overrides, PipelineFile
from trinity_data.cli.printing import Format, print_histogram, print_json, print_table, write_answer
from trinity_data.terminal import say

if TYPE_CHECKING:
    from trinity_data.launch.task_trial import TaskTrial

_REASONS = 5
"""Of each operator; `--json` has all."""


def tasks(
    file: PipelineFile,
    overrides: Overrides = None,
    stage: Annotated[str | None, typer.Option(help="The stage; else the first that explores.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Read so many rows of each task set.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a task set.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write all rows, dropped ones too, as Parquet.")] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write the kept tasks to `task_pipeline.output`, as a run does.")
    ] = False,
) -> None:
    """Run only the task pipeline: what each operator drops and why, its time, histograms of the scores.

    Engines are started where an operator asks the model.
    """
    import pyarrow as pa

    from trinity_data.config import load_pipeline_file
    from trinity_data.launch.task_trial import try_tasks

    config = load_pipeline_file(file, overrides or ())
    trials = try_tasks(config, stage_name=stage, limit=limit, write=write)
    if not trials:
        say("the output is there already, made of the same tasks by the same operators", to=sys.stderr)
        return
    if out is not None:
        write_answer(pa.concat_tables([trial.tasks for trial in trials]), Format.PARQUET, out)
    for trial in trials:
        if as_json:
            print_json(trial.as_json())
        else:
            _print(trial)
    if out is not None and not as_json:
        say(f"wrote {sum(trial.tasks.num_rows for trial in trials):,} rows to {out}")


def _print(trial: TaskTrial) -> None:
    say(f"stage {trial.stage}, {trial.taskset}: {trial.num_kept:,} of {trial.tasks.num_rows:,} rows are kept")
    counts = [(each.operator, each.rows_in, each.rows_out, each.seconds) for each in trial.operators]
    print_table(("operator", "rows in", "rows out", "seconds"), counts)
    dropped = [
        (each.operator, reason, number)
        for each in trial.operators
        for reason, number in list(each.reasons.items())[:_REASONS]
    ]
    examples = [
        (example["task_id"][:12], each.operator, example["reason"], example["prompt"])
        for each in trial.operators
        for example in each.examples
    ]
    if dropped:
        say()
        print_table(("dropped by", "reason", "rows"), dropped)
        say()
        print_table(("example", "dropped by", "reason", "prompt"), examples)
    for name, bins in trial.histograms.items():
        say()
        print_histogram(name, bins, numbers=("rows", "kept"), bar=lambda each: each.tasks)
