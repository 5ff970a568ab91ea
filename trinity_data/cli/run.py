"""`trinity-data run FILE [key=value …]`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trinity_data.stopping import EXIT_CODE, STOPPED, Stop


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
    stop = Stop()
    stop.install()
    try:
        _run(file, overrides or [], quiet, stop)
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        raise typer.Exit(EXIT_CODE) from None
    finally:
        stop.is_over()


def _run(file: Path, overrides: list[str], quiet: bool, stop: Stop) -> None:
    from trinity_data.config import load_pipeline_file

    config = load_pipeline_file(file, overrides)
    from trinity_data.launch.run import run as run_pipeline

    run_pipeline(config, quiet=quiet, stop=stop)
