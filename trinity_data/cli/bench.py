"""What a stage of mode `bench` has found, as a table for each task set."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from trinity_data.cli.printing import print_table
from trinity_data.terminal import say

if TYPE_CHECKING:
    from trinity_data.launch.bench import BenchResults
    from trinity_explorer.bench.estimates import Estimate
    from trinity_explorer.bench.results import SetResult


def print_results(results: BenchResults) -> None:
    """A row for each step; ± is half the width of the 95 % interval."""
    by_set = sorted(results.sets, key=lambda each: each.taskset)
    for name, sets in groupby(by_set, key=lambda each: each.taskset):
        rows = [_cells(each) for each in sets]
        say(f"\n{results.stage}, task set {name}")
        print_table(list(rows[0]), [list(row.values()) for row in rows])
    say(f"± half of the 95 % interval; {results.folder / 'results.json'} has both ends")


def _cells(result: SetResult) -> dict[str, object]:
    return {
        "step": result.step,
        "tasks": result.num_tasks,
        "rollouts": result.num_tasks * result.num_rollouts,
        "failed": result.num_failed,
        **dict(_estimates(result)),
    }


def _estimates(result: SetResult) -> Iterator[tuple[str, str]]:
    """pass@1 is the mean, and of the majorities the last says most."""
    yield f"mean@{result.num_rollouts}", _shown(result.mean)
    for k, estimate in result.pass_at.items():
        if k > 1:
            yield f"pass@{k}", _shown(estimate)
    if result.num_rollouts > 1 and result.maj_at:
        yield f"maj@{result.num_rollouts}", _shown(result.maj_at[result.num_rollouts])


def _shown(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} ± {(estimate.high - estimate.low) / 2:.3f}"
