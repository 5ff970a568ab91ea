"""`trinity-data run FILE [key=value …]`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trinity_data.cli.bench import print_results
from trinity_data.shutdown import EXIT_CODE, STOPPED, Shutdown


def run(
    file: Annotated[str | None, typer.Argument(help="The pipeline file.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes to it, such as algorithm.optimizer.lr=1e-5.")
    ] = None,
    config_file: Annotated[
        Path | None, typer.Option("--config", help="The pipeline file, where it is not the first argument.")
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Say nothing but warnings and errors.")
    ] = False,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes",
            help="Go on although a reward, an operator, the method or a task set is not what it was.",
        ),
    ] = False,
) -> None:
    """Run a pipeline file, or go on with it where it was stopped."""
    if config_file is None and file is None:
        raise typer.BadParameter("give a pipeline file", param_hint="FILE")
    changes = overrides or []
    if config_file is not None and file is not None:
        changes = [file, *changes]
    stop = Shutdown()
    stop.install()
    try:
        from trinity_data.launch.run import run_pipeline

        pipeline = config_file or Path(str(file))
        run_pipeline(
            pipeline, changes, quiet=quiet, accept_changes=accept_changes, stop=stop,
            show=None if quiet else print_results,
        )  # fmt: skip
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        raise typer.Exit(EXIT_CODE) from None
    finally:
        stop.is_over()
