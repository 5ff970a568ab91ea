"""`trinity-data runs`: the runs under a checkpoint root."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from trinity_data.cli.printing import print_json
from trinity_data.job_lock import holder, is_held
from trinity_data.runs import LEDGER, default_root, find_runs
from trinity_data.terminal import say


def runs(
    root: Annotated[Path | None, typer.Argument(help="The checkpoint root.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object for each run.")] = False,
) -> None:
    """List the runs, the newest last: steps, experiences, how many of them failed or wait,
    the last accuracy, and who takes part now: each explorer with the steps that it explores, the trainer with
    its last step and how many more are explored.
    """
    folder = root or default_root()
    folders = find_runs(folder)
    if not folders and not as_json:
        say(f"no runs under {folder}")
    for run in folders:
        found = _run(run, folder)
        if as_json:
            print_json(found)
        else:
            say(_line(found))


def _run(run: Path, root: Path) -> dict[str, Any]:
    from trinity_data.store.sql import open_sql

    with open_sql([run]) as session:
        (counts,) = session.query(
            "select coalesce((select max(step) from steps), 0) as step, (select count(*) from experiences) "
            "as experiences, (select count(*) from experiences where state = 'failed') as failed, "
            "(select count(*) from experiences where state in ('pending', 'raw')) as waiting, "
            "(select round(last(accuracy_mean), 3) from (select step, avg(accuracy) as accuracy_mean from "
            "evals group by step order by step)) as accuracy"
        ).to_pylist()
    changed = datetime.fromtimestamp((run / LEDGER).stat().st_mtime)
    is_running = is_held(run)
    participants = _participants(run, counts["step"]) if is_running else []
    return {
        "run": str(run.relative_to(root)),
        "changed": changed.astimezone().isoformat(timespec="seconds"),
        **counts,
        "participants": participants,
        "running": ", ".join(map(_named, participants)) or (holder(run) if is_running else ""),
    }


def _line(run: Mapping[str, Any]) -> str:
    changed = f"{datetime.fromisoformat(run['changed']):%Y-%m-%d %H:%M}"
    accuracy = "–" if run["accuracy"] is None else f"{run['accuracy']:.3f}"
    rows = f"experiences {run['experiences']:>8}  failed {run['failed']:>6}  waiting {run['waiting']:>6}"
    line = f"{run['run']:<40} {changed}  step {run['step']:>6}  {rows}  accuracy {accuracy}"
    return f"{line}  running: {run['running']}" if run["running"] else line


def _participants(run: Path, trained: int) -> list[dict[str, Any]]:
    """The processes that share the run now; none of one process that does everything."""
    from trinity_data.claims import steps_by_explorer
    from trinity_data.config.run import TRAINER
    from trinity_data.progress import CLAIMS, EXPLORED
    from trinity_data.store.participants import KEY, load_records
    from trinity_data.store.reader import StoreReader

    with closing(StoreReader((run / LEDGER).parent)) as store:
        records = load_records(store.progress(KEY))
        exploring = steps_by_explorer(store.progress_below(f"{CLAIMS}/"))
        explored = max(store.progress_below(f"{EXPLORED}/").values(), default=0)
    here = [record.participant for _, record in sorted(records.items()) if not record.ended]
    return [
        {"name": each.name, "process": each.process, "host": each.host}
        | (
            {"trained": trained, "explored": max(0, explored - trained)}
            if each.name == TRAINER
            else {"explores": exploring.get(each.name, [])}
        )
        for each in here
        if not each.is_known_to_have_ended()
    ]


def _named(participant: Mapping[str, Any]) -> str:
    """With what it has before it."""
    if steps := participant.get("explores"):
        work = f", explores step {', '.join(map(str, steps))}"
    elif "trained" in participant:
        work = f", trained step {participant['trained']}, {participant['explored']} more explored"
    else:
        work = ""
    return f"{participant['name']} (process {participant['process']} on {participant['host']}{work})"
