"""`trinity-data runs`: the runs under a checkpoint root."""

from __future__ import annotations

from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from trinity_data.job_lock import holder, is_held
from trinity_data.runs import LEDGER, default_root, find_runs
from trinity_data.terminal import say


def runs(root: Annotated[Path | None, typer.Argument(help="The checkpoint root.")] = None) -> None:
    """List the runs, the newest last: steps, experiences, how many of them failed or wait,
    the last accuracy, and who takes part now.
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
    line = f"{name!s:<40} {changed}  step {counts['step']:>6}  {rows}  accuracy {accuracy}"
    return f"{line}  running: {now}" if (now := _taking_part(run)) else line


def _taking_part(run: Path) -> str:
    """The processes that work on the run now; empty where nobody does."""
    from trinity_data.store.participants import KEY, load_records
    from trinity_data.store.reader import StoreReader

    if not is_held(run):
        return ""
    with closing(StoreReader((run / LEDGER).parent)) as store:
        records = load_records(store.progress(KEY))
    participants = [record.participant for _, record in sorted(records.items()) if not record.ended]
    named = [f"{each.name} ({each})" for each in participants if not each.is_known_to_have_ended()]
    return ", ".join(named) or holder(run)
