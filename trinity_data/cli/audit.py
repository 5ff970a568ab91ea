"""`trinity-data audit RUN`: checks the counts of a run. The exit code is 1 if there is a problem."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from trinity_data.cli.arguments import Run
from trinity_data.cli.printing import print_table
from trinity_data.runs import resolve_run
from trinity_data.terminal import say

if TYPE_CHECKING:
    from trinity_data.query.audit import AuditReport, StateCounts

_COUNTS = ("generated", "trained", "dropped", "stale", "pending", "failed", "unexplained", "dropped by")


def audit(
    run: Run,
) -> None:
    """Account for every row of a run and compare every file with its checksum.

    Exit code 1 if anything is off.
    """
    from trinity_data.query.audit import audit as audit_store

    folder = resolve_run(run)
    report = audit_store(folder)
    _print_counts(report)
    say(f"{folder}: {_equation(report.total)}")
    if report.expired:
        rows, freed = (sum(getattr(lost, n) for lost in report.expired) for n in ("num_rows", "num_bytes"))
        say(
            f"of these, the contents of {rows:,} rows were expired ({freed / 1e6:,.1f} MB), "
            f"last at {max(lost.at for lost in report.expired)}; their ids and states are kept"
        )
    for remark in report.remarks:
        say(f"note: {remark}")
    megabytes = f"{report.num_files:,} files, {report.num_bytes / 1e6:,.1f} MB"
    if report.ok:
        say(f"{megabytes}: every checksum agrees, and the ledger says what the rows say")
        return
    say(f"{megabytes}: {len(report.problems)} thing(s) are off", to=sys.stderr)
    for problem in report.problems:
        say(f"- {problem}", to=sys.stderr)
    raise typer.Exit(1)


def _print_counts(report: AuditReport) -> None:
    if report.rows:
        print_table(
            ("stage", "step", *_COUNTS), [(row.stage, row.step, *_counts(row)) for row in report.rows]
        )
        say()
        tasksets = [(name, *_counts(counts)) for name, counts in report.tasksets.items()]
        print_table(("task set", *_COUNTS), tasksets)
        say()
    if report.tasks:
        names = ("stage", "tasks of", "read", "tried", "dropped", "waiting")
        rows = [(t.stage, t.taskset, t.read, t.tried, t.dropped, t.waiting) for t in report.tasks]
        print_table(names, rows)
        say()


def _counts(counts: StateCounts) -> Sequence[object]:
    states = {str(state): number for state, number in counts.states.items()}
    return (
        counts.generated,
        *(states[name] for name in ("trained", "dropped", "stale")),
        _pending(counts),
        states["failed"],
        counts.unexplained,
        _by_operator(counts),
    )


def _pending(counts: StateCounts) -> int:
    """Waiting for a batch, or for the operators."""
    return sum(number for state, number in counts.states.items() if state in ("pending", "raw"))


def _by_operator(counts: StateCounts) -> str:
    return ", ".join(f"{operator} {number:,}" for operator, number in sorted(counts.dropped_by.items()))


def _equation(total: StateCounts) -> str:
    states = {str(state): number for state, number in total.states.items()}
    dropped = f"{states['dropped']:,} dropped" + (f" ({_by_operator(total)})" if total.dropped_by else "")
    raw = f" ({states['raw']:,} of them not processed yet)" if states["raw"] else ""
    return (
        f"{total.generated:,} generated = {states['trained']:,} trained + {dropped} + {states['stale']:,} "
        "stale"
        f" + {_pending(total):,} pending{raw} + {states['failed']:,} failed, "
        f"{total.unexplained:,} unexplained"
    )
