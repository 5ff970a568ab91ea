"""`trinity-data whatif RUN --pipeline new.yaml`: another experience pipeline over the rollouts
that a run has stored.
"""

from __future__ import annotations

import re
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trinity_data.cli.arguments import Run
from trinity_data.runs import resolve_run
from trinity_data.terminal import say

if TYPE_CHECKING:
    from trinity_operators.compare import Comparison, Shift

MANY_EXPERIENCES = 100_000


def whatif(
    run: Run,
    pipeline: Annotated[Path, typer.Option(help="The changed pipeline file.")],
    steps: Annotated[str, typer.Option(help="a:b, both included; either may be left out.")] = ":",
    stage: Annotated[str | None, typer.Option(help="The stage, where several have rollouts.")] = None,
    allow: Annotated[
        list[str] | None, typer.Option(help="An operator that keeps state or calls a model, by name.")
    ] = None,
    workers: Annotated[
        bool | None,
        typer.Option(
            "--workers/--no-workers",
            help="Spread the work with Ray Data; by itself from 100,000 experiences on.",
        ),
    ] = None,
    save: Annotated[str | None, typer.Option(help="Keep it as a run of this name, to train from.")] = None,
) -> None:
    """Say what another experience pipeline would have kept, rewarded and preferred."""
    from trinity_data.config import load_pipeline_file
    from trinity_data.launch import whatif as rerun

    folder, bounds = resolve_run(run), _bounds(steps)
    config = load_pipeline_file(pipeline)
    chosen = rerun.stage_to_rerun(config, folder, stage)
    operators = rerun.operators_of(folder, chosen, config.file.parent, allowed=allow or [])
    for name in rerun.stored_labels(operators):
        say(f"{name}: the answers of the run, no model is asked; --allow {name} asks again")
    stored = rerun.stored_steps(folder, chosen.stage_name, bounds)
    spread = sum(stored.values()) >= MANY_EXPERIENCES if workers is None else workers
    total = rerun.Total()
    with ExitStack() as stack:
        if spread and (workers or not any(operator.keeps_state for operator in operators)):
            from trinity_data.launch.cluster import local_ray
            from trinity_data.launch.whatif_workers import Spread, rerun_spread

            stack.enter_context(local_ray(config))
            what = Spread(folder, chosen, config.file.parent, tuple(allow or ()), save is not None)
            rerun_steps = rerun_spread(what, stored)
        else:
            rerun_steps = rerun.rerun_operators(folder, operators, chosen.stage_name, stored)
        passing, branch = total.adding(rerun_steps), None
        if save is not None:
            branch = rerun.save(folder, save, chosen.stage_name, passing, last_step=max(stored))
        else:
            deque(passing, maxlen=0)
    steps_named = f"steps {total.steps[0]} to {total.steps[-1]}"
    say(f"stage {chosen.stage_name}, {steps_named}: " + "\n  ".join(_lines(total.comparison)))
    if branch is not None:
        say(f"saved as {branch.folder}, to be trained from step {total.steps[0]}")


def _bounds(text: str) -> tuple[int | None, int | None]:
    bounds = re.fullmatch(r"(\d*):(\d*)", text) or re.fullmatch(r"(\d+)()", text)
    if bounds is None:
        raise typer.BadParameter(
            f"found {text!r}; wanted a:b, such as 10:20, 10: or :20", param_hint="--steps"
        )
    if ":" not in text:
        return int(text), int(text)
    first, last = bounds.groups()
    return (int(first) if first else None, int(last) if last else None)


def _lines(comparison: Comparison) -> list[str]:
    unsettled = f", {comparison.num_without_outcome:,} experiences without an outcome"
    return [
        f"{comparison.num_rows:,} experiences of {comparison.num_rollouts:,} rollouts "
        f"in {comparison.num_groups:,} groups{unsettled if comparison.num_without_outcome else ''}",
        f"kept        {comparison.kept_before:,} → {comparison.kept_after:,}  "
        f"({comparison.newly_kept:,} kept that were dropped, "
        f"{comparison.newly_dropped:,} dropped that were kept)",
        f"dropped by  {_listed(comparison.dropped_by_before)} → {_listed(comparison.dropped_by_after)}",
        f"reward      {_shift(comparison.reward)}",
        f"advantage   {_shift(comparison.advantage)}",
        f"signs       {_share(comparison.signs_opposite)} turn round, "
        f"{_share(comparison.signs_lost)} become zero, {_share(comparison.signs_gained)} were zero",
        f"variance    {comparison.groups_losing_variance:,} groups lose theirs, "
        f"{comparison.groups_gaining_variance:,} gain some",
    ]


def _listed(dropped: dict[str, int]) -> str:
    return ", ".join(f"{operator} {count:,}" for operator, count in dropped.items()) or "nothing"


def _shift(shift: Shift) -> str:
    if not shift.num_rows:
        return "no row has it both times"
    return (
        f"mean {_number(shift.mean_before)} → {_number(shift.mean_after)}, {shift.num_changed:,} of "
        f"{shift.num_rows:,} changed, at most by {shift.largest:.4g}"
    )


def _share(share: float) -> str:
    return "none" if share != share else f"{share:.1%}"


def _number(value: float) -> str:
    """Without a minus before what rounds to zero."""
    return f"{round(value, 4) + 0.0:.4f}"
