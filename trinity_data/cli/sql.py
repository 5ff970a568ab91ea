"""`trinity-data sql RUN… ["select …"]`: questions to runs, while they go on or afterwards."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trinity_data.cli.printing import Format, write_answer
from trinity_data.errors import StoreError, TrinityError
from trinity_data.job_lock import LOCK_FILE, is_held
from trinity_data.runs import LEDGER, is_run, resolve_runs
from trinity_data.terminal import say

if TYPE_CHECKING:
    import pyarrow as pa


def sql(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN… [QUERY]", help="Job folders, or project/name; then one query, or none for a shell."
        ),
    ],
    format: Annotated[Format, typer.Option("--format", "-f", help="How to print rows.")] = Format.TABLE,
    to: Annotated[Path | None, typer.Option(help="Write the rows to this file instead.")] = None,
    follow: Annotated[
        float | None, typer.Option(min=0.1, help="Ask again every so many seconds, while a run is written.")
    ] = None,
    as_of: Annotated[
        str | None, typer.Option(help="As things were at the end of this step, or at this tag.")
    ] = None,
) -> None:
    """Ask one run or several a question in SQL."""
    # the last word is the query, unless it is a run too
    query = None if len(words) == 1 or is_run(words[-1]) else words[-1]
    runs = resolve_runs(words if query is None else words[:-1])
    if query is None:
        if follow is not None or to is not None or format is Format.PARQUET:
            raise StoreError("--follow, --to and --format parquet need a query after the runs")
        _shell(runs, format, as_of)
    elif follow is None:
        write_answer(ask(runs, query, as_of=as_of), format, to)
    else:
        _follow(runs, query, format, to, follow, as_of)


def ask(runs: Sequence[Path], query: str, *, as_of: str | None = None) -> pa.Table:
    """The answer as of now, or as of the end of a step."""
    from trinity_data.store.sql import open_sql

    with open_sql(runs, as_of=as_of) as session:
        answer = session.query(query)
        for problem in session.damaged:
            say(f"trinity-data: without the rows of a damaged file: {problem}", to=sys.stderr)
        return answer


def _follow(
    runs: Sequence[Path], query: str, format: Format, to: Path | None, seconds: float, as_of: str | None
) -> None:
    """Prints the answer whenever it has changed, until nobody writes the runs any more, or ctrl-c."""
    if as_of is not None:
        raise StoreError("--as-of shows a version that does not change; leave out --follow")
    if format is Format.PARQUET and to is None:
        raise StoreError("--follow prints many answers and Parquet holds one; name a file with --to")
    before: pa.Table | None = None
    try:
        while True:
            ended = not any(_is_written(run) for run in runs)
            answer = ask(runs, query)
            if before is None or not answer.equals(before):
                if to is None and format is Format.TABLE and sys.stdout.isatty():
                    print("\x1b[2J\x1b[H", end="")  # replaces the table before
                elif to is None and format is not Format.JSON and before is not None:
                    say()
                write_answer(answer, format, to)
                sys.stdout.flush()
            before = answer
            if ended:
                say("nobody writes to it any more; this was the last answer", to=sys.stderr)
                return
            time.sleep(seconds)
    except KeyboardInterrupt:
        return


def _is_written(run: Path) -> bool:
    """False also when the process that held the job folder was killed."""
    from trinity_data.store.ledger import is_in_use

    # a store that was opened by itself has no lock
    return is_in_use((run / LEDGER).parent) and (is_held(run) or not (run / LOCK_FILE).exists())


def _shell(runs: Sequence[Path], format: Format, as_of: str | None) -> None:
    say(f"{', '.join(map(str, runs))}: end a query with a semicolon, ctrl-d leaves")
    lines: list[str] = []
    while True:
        try:
            lines.append(input("sql> " if not lines else "...> "))
        except EOFError:
            return
        text = "\n".join(lines).strip()
        if text.endswith(";") or not text:
            lines = []
            try:
                if text:
                    write_answer(ask(runs, text, as_of=as_of), format)
            except TrinityError as error:
                say(error)
