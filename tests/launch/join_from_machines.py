"""A trainer, an explorer and one that joins later, on three machines, of which the last is lost in the end.
The first two have the job's folder in common, the last has none with them. In a process without another Ray;
prints what each command ended with, as JSON.

    python -m tests.launch.join_from_machines ROOT FILE OVERRIDES...
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.launch.conftest import rows_of
from tests.machine import Machine
from tests.nodes import ray_nodes
from trinity_data.errors import StoreError

CPUS = {"trainer": 1, "explorer": 2, "joins": 2}
SECONDS = 400
STARTED = "(select count(*) from events where kind = '{kind}') > 0"
JOINED = "(select count(*) from experiences where explorer = 'joins' and model_version > 0) > 0"


def wait_for(job: Path, sql: str, machines: list[Machine]) -> None:
    """Until the query answers yes."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        ended = [each.outcome() for each in machines if each.process.poll() is not None]
        assert not ended, ended
        with contextlib.suppress(StoreError):
            if rows_of(job, f"select {sql} as yes")[0]["yes"]:
                return
        time.sleep(0.2)
    raise AssertionError(sql)


def run(root: Path, file: Path, overrides: list[str]) -> dict[str, Any]:
    shared, own = root / "shared", root / "own"
    job = shared / "tests" / "nodes"
    command = [sys.executable, "-m", "trinity_data.cli.main", "run", str(file), *overrides]
    machines: list[Machine] = []

    def start(role: str, place: Path, *more: str) -> Machine:
        hidden = {shared, own} - {place}
        names = {"TRINITY_CHECKPOINT_ROOT_DIR": str(place), "TRINITY_RUN_NAME": job.name}
        machines.append(Machine(CPUS[role], [*command, *more], hidden=sorted(hidden), **names))
        return machines[-1]

    for folder in (shared, own):
        folder.mkdir()
    with ray_nodes([0]):
        try:
            trainer = start("trainer", shared, "mode=train")
            # its worker has the only place that there is
            wait_for(job, STARTED.format(kind="stage_started"), machines)
            explorer = start("explorer", shared, "mode=explore")
            wait_for(job, STARTED.format(kind="explorer_started"), machines)
            joins = start("joins", own, "mode=explore", "explorer.name=joins")
            wait_for(job, JOINED, machines)
            joins.lose()
            return {"explorer": explorer.outcome(), "trainer": trainer.outcome()}
        finally:
            for each in machines:
                each.lose()


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])))
