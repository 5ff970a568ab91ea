"""`trinity-data curriculum …`: which tasks the next step of a pipeline file would get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trinity_data.cli.printing import print_table
from trinity_data.terminal import say

if TYPE_CHECKING:
    from trinity_data.launch.preview import Preview

_BAR = 30

app = typer.Typer(no_args_is_help=True)


@app.callback()
def curriculum() -> None:
    """Look at the choice of tasks."""


@app.command()
def preview(
    file: Annotated[Path, typer.Argument(help="The pipeline file (YAML).")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, before it is read.")] = None,
    stage: Annotated[
        str | None, typer.Option(help="The stage; else the first that explores and has not ended.")
    ] = None,
    rows: Annotated[
        int, typer.Option(min=1, help="Rows to read of each task set where there is no run yet.")
    ] = 2000,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object, with the ids of the tasks.")
    ] = False,
) -> None:
    """Show the tasks of the next step beside those that it chooses from, without running anything.

    Of a run that has begun its store is read, while it goes on too.
    """
    from trinity_data.launch.check import load_checked
    from trinity_data.launch.preview import preview as preview_step

    found = preview_step(load_checked(file, overrides or ()), stage_name=stage, num_rows=rows)
    if as_json:
        say(json.dumps(found.as_json(), ensure_ascii=False))
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
            most = max((each_bin.chosen for each_bin in bins), default=0) or 1
            table = [
                (one.lower, one.upper, one.tasks, one.chosen, "█" * round(_BAR * one.chosen / most))
                for one in bins
            ]
            print_table((f"{name} from", "to", "tasks", "chosen", ""), table)
