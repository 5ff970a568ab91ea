"""`trinity-data retain RUN`: takes the contents of old experiences off the disk and keeps the rows."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from trinity_data.cli.arguments import Run
from trinity_data.runs import resolve_run
from trinity_data.terminal import say

if TYPE_CHECKING:
    from datetime import timedelta

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def retain(
    run: Run,
    older_than: Annotated[str | None, typer.Option(help="An age, such as 12h, 30d or 8w.")] = None,
    max_size: Annotated[str | None, typer.Option(help="Of the store, such as 500MB or 10GB.")] = None,
    keep_tag: Annotated[
        list[str] | None, typer.Option(help="Keep what this tag shows, instead of what any tag shows.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and write nothing.")] = False,
) -> None:
    """Remove tokens, log-probs and texts of experiences that are done with.

    Exit code 1 if the size is not reached.
    """
    from trinity_data.store.retention import Limits, retain
    from trinity_data.store.snapshot import store_folder

    if older_than is None and max_size is None:
        raise typer.BadParameter("say what may go: --older-than, --max-size, or both")
    age = None if older_than is None else _age(older_than)
    max_bytes = None if max_size is None else _size(max_size)
    folder = resolve_run(run)
    limits = Limits(older_than=age, max_bytes=max_bytes, keep_tags=keep_tag or None)
    result = retain(store_folder(folder), limits, dry_run=dry_run)
    expired, freed = ("would expire", "at most ") if dry_run else ("expired", "")
    say(
        f"{expired} the contents of {result.num_rows:,} experiences in {result.num_files:,} file(s), "
        f"{freed}{result.freed_bytes / 1e6:,.2f} MB; {result.left_bytes / 1e6:,.2f} MB are left"
    )
    reasons = Counter(kept.why for kept in result.kept)
    for why, number in reasons.most_common():
        num_bytes = sum(kept.num_bytes for kept in result.kept if kept.why == why)
        say(f"kept {number:,} file(s), {num_bytes / 1e6:,.2f} MB: each {why}")
    if max_bytes is not None and result.left_bytes > max_bytes:
        say(f"the store is still larger than {max_size}: nothing else may go")
        raise typer.Exit(1)


def _age(text: str) -> timedelta:
    from datetime import timedelta

    quantity = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]+)", text.strip())
    if quantity is None or quantity[2] not in _SECONDS:
        units = ", ".join(_SECONDS)
        message = f"found {text!r}; a number and one of {units}, such as 30d"
        raise typer.BadParameter(message, param_hint="--older-than")
    return timedelta(seconds=float(quantity[1]) * _SECONDS[quantity[2]])


def _size(text: str) -> int:
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return TypeAdapter(ByteSize).validate_python(text)
    except ValidationError:
        message = f"found {text!r}; a number and one of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB, such as 10GB"
        raise typer.BadParameter(message, param_hint="--max-size") from None
