"""`trinity-data import FILES --as experiences --to RUN_DIR`: rollouts made elsewhere, as a run."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from trinity_data.terminal import say


class Rows(StrEnum):
    EXPERIENCES = "experiences"


def import_(
    files: Annotated[list[Path], typer.Argument(help="jsonl, json, parquet or csv.")],
    to: Annotated[Path, typer.Option("--to", help="The job folder to make; must not exist.")],
    rows: Annotated[Rows, typer.Option("--as", help="What the rows are.")] = Rows.EXPERIENCES,
    map: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            help="FIELD=COLUMN, for prompt, system, answer, response, reward, explorer and error; "
            "`*.x` is the field x "
            "of every column that has it, one rollout each.",
        ),
    ] = None,
    stage: Annotated[str, typer.Option(help="The stage that the rows belong to.")] = "imported",
    taskset: Annotated[str | None, typer.Option(help="Name of the task set; else of the first file.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A model folder; without it the rows have text and no tokens.")
    ] = None,
) -> None:
    """Bring in rollouts made elsewhere, with their labels as rewards."""
    from trinity_data.exchange.import_ import ColumnMapping, import_experiences

    del rows  # the only kind there is
    mapped = ColumnMapping.parse(map or [])
    loaded = None
    if tokenizer is not None:
        from trinity_data.tokenizer import load_tokenizer

        loaded = load_tokenizer(str(tokenizer))
    imported = import_experiences(files, to, mapped=mapped, stage=stage, taskset=taskset, tokenizer=loaded)
    say(
        f"{imported.folder}: {imported.num_experiences:,} experiences of {imported.num_tasks:,} tasks, "
        f"{imported.num_rewarded:,} with a reward"
        + ("" if tokenizer else "; no tokens, as no tokenizer was given")
    )
