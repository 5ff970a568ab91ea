"""`trinity-data run FILE [key=value …]`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def run(
    file: Annotated[Path, typer.Argument(help="The pipeline file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes to it, such as algorithm.optimizer.lr=1e-5.")
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Say nothing but warnings and errors.")
    ] = False,
) -> None:
    """Run a pipeline file, or go on with it where it was stopped."""
    from trinity_data.config import load_pipeline_file

    config = load_pipeline_file(file, overrides or [])
    from trinity_data.launch.run import run as run_pipeline

    try:
        run_pipeline(config, quiet=quiet)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        raise typer.Exit(130) from None
