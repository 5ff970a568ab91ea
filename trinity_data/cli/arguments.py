"""Arguments that several commands take, each with its one help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

Run: TypeAlias = Annotated[
    str, typer.Argument(help="A job folder, or project/name under the checkpoint root.")
]
PipelineFile: TypeAlias = Annotated[Path, typer.Argument(help="The pipeline file (YAML).")]
Overrides: TypeAlias = Annotated[list[str] | None, typer.Argument(help="key.path=value, before it is read.")]
