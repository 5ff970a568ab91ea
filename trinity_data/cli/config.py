"""`trinity-data config …`: what can be said about a pipeline file without running it. Nothing is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trinity_data.cli.arguments import Overrides, PipelineFile
from trinity_data.errors import ConfigError

if TYPE_CHECKING:
    from trinity_data.config import RunConfig

app = typer.Typer(no_args_is_help=True)


@app.callback()
def config() -> None:
    """Look at pipeline files."""


@app.command()
def check(
    file: PipelineFile,
    overrides: Overrides = None,
    elsewhere: Annotated[
        bool,
        typer.Option(help="It is to run on another machine: do not look for GPUs, models and data here."),
    ] = False,
) -> None:
    """Say whether a pipeline file can be run: every problem with its line, and exit code 2, or its stages."""
    from trinity_data.config.preflight import notes_about_machine
    from trinity_data.launch.check import execution_notes, load_checked, score_notes

    try:
        run = load_checked(file, overrides or (), look_at_machine=not elsewhere)
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(error.exit_code) from None
    typer.echo(f"{file}: can be run; {summary(run)}")
    machine = () if elsewhere else notes_about_machine(run)
    for note in (*run.notes, *machine, *execution_notes(run), *score_notes(run)):
        typer.echo(note)


def summary(run: RunConfig) -> str:
    """The run's folder and stages in one line."""
    stages = []
    for stage in run.stages:
        buffer = stage.buffer
        if stage.evaluates_only:
            names = [taskset.name for _, taskset in stage.tried_tasksets()]
            stages.append(f"{stage.stage_name} (bench of {', '.join(names)})")
            continue
        length = f"{buffer.total_steps} steps" if buffer.total_steps else f"{buffer.total_epochs} epoch(s)"
        stages.append(f"{stage.stage_name} ({stage.algorithm.algorithm_type}, {stage.mode}, {length})")
    return f"{run.project}/{run.name}: {', '.join(stages)}"
