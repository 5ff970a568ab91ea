"""`trinity-data export RUN sft|dpo|kto|raw --to DIR`: experiences as files for other trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trinity_data.cli.branch import resolve_at
from trinity_data.exchange.kinds import Format, Kind
from trinity_data.terminal import say


def export(
    run: Annotated[str, typer.Argument(help="A run, or RUN@STEP or RUN@TAG for how it was then.")],
    kind: Annotated[Kind | None, typer.Argument(help="Which columns; not with --repeat.")] = None,
    to: Annotated[Path, typer.Option("--to", help="The folder to write; must not exist.")] = ...,  # type: ignore[assignment]
    where: Annotated[str, typer.Option(help="A condition on the view `experiences`.")] = "true",
    query: Annotated[
        str | None, typer.Option(help="dpo: SQL that selects `chosen` and `rejected` experience ids.")
    ] = None,
    messages: Annotated[
        bool, typer.Option("--messages", help="sft: one column `messages`, not `prompt` and `completion`.")
    ] = False,
    threshold: Annotated[float, typer.Option(help="kto: a raw reward above it is a good completion.")] = 0.5,
    ids: Annotated[bool, typer.Option("--ids", help="Add the experiences' ids.")] = False,
    format: Annotated[Format, typer.Option("--format", "-f", help="How to write rows.")] = Format.PARQUET,
    repeat: Annotated[
        Path | None,
        typer.Option(help="A manifest: export the same again, and fail if it comes out different."),
    ] = None,
) -> None:
    """Write experiences in the columns that TRL's trainers take, with a manifest that reproduces them."""
    from trinity_data.exchange import export as exporting

    if repeat is not None:
        if kind is not None:
            raise typer.BadParameter(
                "a manifest says what was exported; leave the kind away", param_hint="--repeat"
            )
        folder, _ = resolve_at(run)
        done = exporting.export_again(folder, repeat, to)
    elif kind is None:
        raise typer.BadParameter("one of sft, dpo, kto and raw is wanted", param_hint="KIND")
    else:
        folder, version = resolve_at(run)
        # an option that would change nothing is a mistake
        if query is not None and kind is not Kind.DPO:
            raise typer.BadParameter(f"pairs are for dpo; this is {kind}", param_hint="--query")
        if messages and kind is not Kind.SFT:
            raise typer.BadParameter(f"only sft has the column; this is {kind}", param_hint="--messages")
        request = exporting.Request(
            kind=kind, where=where, query=query, messages=messages, threshold=threshold,
            ids=ids, format=format,
        )  # fmt: skip
        done = exporting.export(folder, request, to, version=version)
    left_out = ", ".join(f"{count:,} {why}" for why, count in done.left_out.items())
    say(f"{done.num_rows:,} rows in {done.folder}" + (f"; left out: {left_out}" if left_out else ""))
