"""`trinity-data sql RUN ["select …"]`: questions to a run, while it goes on or afterwards."""

from __future__ import annotations

import csv
import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trinity_data.cli.runs import LEDGER, default_root, find_runs
from trinity_data.errors import StoreError, TrinityError, did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa


class Format(StrEnum):
    TABLE = "table"
    CSV = "csv"
    JSON = "json"


def sql(
    run: Annotated[str, typer.Argument(help="A job folder, or project/name under the checkpoint root.")],
    query: Annotated[str | None, typer.Argument(help="One query; without it, a small shell.")] = None,
    format: Annotated[Format, typer.Option("--format", "-f", help="How to print rows.")] = Format.TABLE,
) -> None:
    """Ask a run a question in SQL."""
    folder = resolve_run(run)
    if query is not None:
        show(ask(folder, query), format)
        return
    _shell(folder, format)


def resolve_run(name: str) -> Path:
    """The job folder that a person means. Raises StoreError with the nearest name."""
    root = default_root()
    for folder in (Path(name), root / name):
        if (folder / LEDGER).exists():
            return folder
    known = [str(folder.relative_to(root)) for folder in find_runs(root)]
    raise StoreError(
        f"no run {name!r}; known under {root}: {', '.join(known) or 'none'}{did_you_mean(name, known)}"
    )


def ask(folder: Path, query: str) -> pa.Table:
    """The answer as of now."""
    from trinity_data.store.sql import open_sql

    with open_sql([folder]) as session:
        return session.query(query)


def show(table: pa.Table, format: Format) -> None:
    """Prints rows; a table is cut to the width of the terminal, the other forms are whole."""
    if format is Format.JSON:
        for row in table.to_pylist():
            print(json.dumps(row, default=str))
    elif format is Format.CSV:
        writer = csv.writer(sys.stdout)
        writer.writerow(table.column_names)
        writer.writerows(zip(*(column.to_pylist() for column in table.columns), strict=True))
    else:
        _print_table(table)


def _print_table(table: pa.Table) -> None:
    from rich.console import Console
    from rich.table import Table

    printed = Table(*table.column_names, box=None, pad_edge=False, header_style="bold")
    for row in table.to_pylist():
        printed.add_row(*(_cell(value) for value in row.values()))
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(printed)
    console.print(f"{table.num_rows:,} rows", style="dim")


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = "" if value is None else str(value)
    return text if len(text) <= 300 else f"{text[:297]}..."


def _shell(folder: Path, format: Format) -> None:
    print(f"{folder}: end a query with a semicolon, ctrl-d leaves")
    lines: list[str] = []
    while True:
        try:
            lines.append(input("sql> " if not lines else "...> "))
        except EOFError:
            return
        text = "\n".join(lines).strip()
        if text.endswith(";") or not text:
            lines = []
            _answer(folder, text, format)


def _answer(folder: Path, text: str, format: Format) -> None:
    if not text:
        return
    try:
        show(ask(folder, text), format)
    except TrinityError as error:
        print(error)
