"""`trinity-data runs`: the runs under a checkpoint root."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from trinity_data.runs import LEDGER, default_root, find_runs
from trinity_data.terminal import say


def runs(root: Annotated[Path | None, typer.Argument(help="The checkpoint root.")] = None) -> None:
    """List the runs, the newest last: steps, experiences, how many of them failed or wait,
    and the last accuracy.
    """
    folder = root or default_root()
    folders = find_runs(folder)
    if not folders:
        say(f"no runs under {folder}")
    for run in folders:
        say(_line(run, folder))


def _line(run: Path, root: Path) -> str:
    from trinity_data.store.sql import open_sql

    with open_sql([run]) as session:
        counts = session.query(
            "select coalesce((select max(step) from steps), 0) as step, (select count(*) from experiences) "
            "as experiences, (select count(*) from experiences where state = 'failed') as failed, "
            "(select count(*) from experiences where state in ('pending', 'raw')) as waiting, "
            "(select round(last(accuracy_mean), 3) from (select step, avg(accuracy) as accuracy_mean from "
            "evals group by step order by step)) as accuracy"
        ).to_pylist()[0]
    changed = datetime.fromtimestamp((run / LEDGER).stat().st_mtime).strftime("%Y-%m-%d %H:%M")
    accuracy = "–" if counts["accuracy"] is None else f"{counts['accuracy']:.3f}"
    name = run.relative_to(root)
    rows = (
        f"experiences {counts['experiences']:>8}  failed {counts['failed']:>6}  waiting "
        f"{counts['waiting']:>6}"
    )
    return f"{name!s:<40} {changed}  step {counts['step']:>6}  {rows}  accuracy {accuracy}"
