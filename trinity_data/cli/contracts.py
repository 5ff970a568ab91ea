"""`trinity-data contracts RUN [FILE]`: checks contracts in a stored run. Exit code 1 if one is broken."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trinity_data.cli.printing import print_table
from trinity_data.runs import resolve_run
from trinity_data.terminal import say

if TYPE_CHECKING:
    from trinity_data.launch.contracts import ContractAnswer

_MOST_SHOWN = 5


def contracts(
    run: Annotated[str, typer.Argument(help="A job folder, or project/name under the checkpoint root.")],
    file: Annotated[
        Path | None,
        typer.Argument(help="A pipeline file, or a file with contracts alone; else the run's own contracts."),
    ] = None,
) -> None:
    """Check contracts in every explored step of a run, which is not changed.

    Exit code 1 if one is broken.
    """
    from trinity_data.launch.contracts import check_stored_run

    folder = resolve_run(run)
    answers = check_stored_run(folder, file)
    if not answers:
        say(f"{folder}: there are no contracts; name a file that has some")
        return
    names = ("stage", "contract", "check", "action", "steps", "broken")
    print_table(names, [_cells(answer) for answer in answers])
    for answer in answers:
        _print_breaches(answer)
    if any(answer.broken for answer in answers):
        raise typer.Exit(1)


def _cells(answer: ContractAnswer) -> tuple[object, ...]:
    contract = answer.contract
    return (
        answer.stage, contract.name, contract.check, contract.action, len(answer.findings), len(answer.broken)
    )  # fmt: skip


def _print_breaches(answer: ContractAnswer) -> None:
    for finding in answer.broken[:_MOST_SHOWN]:
        say(f"{answer.stage}, step {finding.step}: {finding.message}")
    name = answer.contract.name
    if len(answer.broken) > _MOST_SHOWN:
        more = len(answer.broken) - _MOST_SHOWN
        say(f"{answer.stage}: contract {name!r} is broken in {more:,} more steps")
    for reason, times in Counter(answer.not_checked.values()).items():
        say(f"{answer.stage}: contract {name!r} was not checked in {times:,} steps: {reason}")
