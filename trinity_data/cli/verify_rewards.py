"""`trinity-data verify-rewards RUN`: computes stored rewards again. The exit code is 1 if one differs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trinity_data.cli.arguments import Run
from trinity_data.cli.printing import print_table
from trinity_data.runs import resolve_run
from trinity_data.terminal import say

if TYPE_CHECKING:
    from trinity_data.launch.verify_rewards import Difference


def verify_rewards(
    run: Run,
    sample: Annotated[
        int | None, typer.Option(min=1, help="Only so many rollouts, always the same ones.")
    ] = None,
) -> None:
    """Compute stored rewards again from the stored responses, and name those that differ.

    Exit code 1 if one differs.
    """
    from trinity_data.launch.verify_rewards import verify_rewards as verify

    folder = resolve_run(run)
    found = verify(folder, sample=sample)
    if found.differences:
        names = ("experience", "task", "reward function", "stored", "recomputed")
        print_table(names, [_cells(each) for each in found.differences])
        say()
    recomputed = found.num_equal + len(found.differences)
    counts = f"{found.num_equal:,} equal, {len(found.differences):,} different"
    say(
        f"{folder}: {recomputed:,} of {recomputed + found.skipped.total():,} rewards recomputed: "
        f"{counts if recomputed else 'nothing to measure'}"
    )
    for reason, number in sorted(found.skipped.items()):
        say(f"skipped {number:,}: {reason}")
    if found.differences:
        raise typer.Exit(1)


def _cells(each: Difference) -> tuple[object, ...]:
    recomputed = each.error if each.recomputed is None else f"{each.recomputed:.6g}"
    return each.experience_id, each.task_id, each.reward_fn, f"{each.stored:.6g}", recomputed
