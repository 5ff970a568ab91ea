"""`trinity-data curriculum …`: which tasks the next step of a pipeline file would get."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trinity_data.cli.arguments import Overrides, PipelineFile
from trinity_data.cli.printing import print_histogram, print_json
from trinity_data.terminal import say

if TYPE_CHECKING:
    from trinity_data.launch.preview import Preview

app = typer.Typer(no_args_is_help=True)


@app.callback()
def curriculum() -> None:
    """Look at the choice of tasks."""


@app.command()
def preview(
    file: PipelineFile,
    overrides: Overrides = None,
    stage: Annotated[
        str | None, typer.Option(help="The stage; else the first that explores and has not ended.")
    ] = None,
    rows: Annotated[
        int, typer.Option(min=1, help="Rows to read of each task set where there is no run yet.")
    ] = 2000,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, with the tasks' ids.")] = False,
) -> None:
    """Show the tasks of the next step beside those that it chooses from, without running anything.

    Of a run that has begun its store is read, while it goes on too.
    """
    from trinity_data.launch.check import load_checked
    from trinity_data.launch.preview import preview as preview_step

    found = preview_step(load_checked(file, overrides or ()), stage_name=stage, num_rows=rows)
    if as_json:
        print_json(found.as_json())
    else:
        _print(found)


def _print(found: Preview) -> None:
    if found.has_ended:
        say(
            f"stage {found.stage} has explored its last step, {found.step - 1}; step {found.step} comes only "
            "where buffer.total_steps or total_epochs is raised"
        )
    where = "the run's store" if found.from_run else "the first rows that were read"
    for each in found.tasksets:
        say(
            f"stage {found.stage}, step {found.step}: {len(each.chosen)} tasks of {each.taskset}, "
            f"chosen from {each.num_tasks:,} of {where}"
        )
        for name, bins in each.histograms.items():
            print_histogram(name, bins, numbers=("tasks", "chosen"), bar=lambda each: each.chosen)
