"""`trinity-data operators …`: the operators that a pipeline file may name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trinity_data.cli.operator_checks import examine
from trinity_data.cli.operator_new import new
from trinity_data.cli.printing import Format, print_table, write_answer
from trinity_data.terminal import say

if TYPE_CHECKING:
    from trinity_operators.catalog import Description

app = typer.Typer(no_args_is_help=True)


@app.callback()
def operators() -> None:
    """List, show, make and test operators."""


@app.command(name="list")
def list_operators(
    word: Annotated[
        str, typer.Argument(help="Only operators with this in their name, kind or description.")
    ] = "",
    format: Annotated[Format, typer.Option("--format", "-f", help="How to print rows.")] = Format.TABLE,
) -> None:
    """List the operators: built-in ones, those of installed packages, and Data-Juicer's."""
    import pyarrow as pa

    from trinity_operators.catalog import CatalogEntry, catalog

    rows = [vars(entry) for entry in catalog()]
    wanted = [row for row in rows if word.lower() in " ".join(row.values()).lower()]
    schema = pa.schema([(name, pa.string()) for name in CatalogEntry.__annotations__])
    write_answer(pa.Table.from_pylist(wanted, schema=schema), format)


app.command()(new)
app.command(name="test")(examine)


@app.command()
def show(
    name: Annotated[
        str, typer.Argument(help="As in a pipeline file: a name, ./file.py:Name or module:Name.")
    ],
) -> None:
    """Print what an operator does, its arguments, and what it reads, writes and needs."""
    from trinity_operators.catalog import describe

    _print_description(describe(name, Path()))


def _print_description(description: Description) -> None:
    entry = description.entry
    say(f"{entry.name}: {entry.kind}, {entry.source}, version {description.version}")
    if description.doc:
        say(f"\n{description.doc}")
    say()
    names = ["argument", "type", "default", "bounds", "meaning"]
    arguments = [list(vars(argument).values()) for argument in description.arguments]
    # bounds are known of our operators, meanings of Data-Juicer's
    shown = [number for number in range(len(names)) if number < 3 or any(row[number] for row in arguments)]
    if arguments:
        print_table([names[n] for n in shown], [[row[n] for n in shown] for row in arguments])
    else:
        say("takes no arguments")
    declared = dict(description.declared)
    writes = [*description.writes, *(["scores"] if declared.pop("writes_more", False) else [])]
    say(f"\nreads: {', '.join(description.reads) or 'what its arguments name'}")
    nothing = "what its arguments name" if entry.kind == "mapper" else "no column"
    say(f"writes: {', '.join(writes) or nothing}")
    for attribute, value in declared.items():
        say(f"{attribute}: {value}")
