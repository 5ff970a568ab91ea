"""A trainer and an explorer on two machines. The trainer's is lost, with its store, at MOMENT; its
command is then started on a third that has the job's folder too. In a process without another Ray; prints
what each command ended with, as JSON.

    python -m tests.launch.lose_trainer_machine ROOT FILE EXPLORER MOMENT OVERRIDES...

EXPLORER is `shared` where the explorer's machine has the job's folder, else `own`. MOMENT is a step, or
`endN`: when the trainer has ended after step N, and the explorer lacks its last weights, as it is
stopped.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.launch.conftest import processes_of, rows_of
from tests.launch.join_from_machines import STARTED, wait_for
from tests.machine import Machine
from tests.nodes import ray_nodes
from trinity_data.errors import StoreError
from trinity_data.progress import explored_key
from trinity_data.store.reader import StoreReader

# a rank has one; the explorer's engine is in its process
CPUS = {"trainer": 1, "explorer": 0}
SECONDS = 400
STAGE = "grpo"


def wait_explored(job: Path, step: int) -> None:
    """Until all steps up to this one are explored."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        with suppress(StoreError):
            reader = StoreReader(job / "store")
            while time.monotonic() < end:
                if (reader.progress(explored_key(STAGE)) or 0) >= step:
                    reader.close()
                    return
                time.sleep(0.02)
    raise AssertionError(f"step {step} is not explored")


def wait_end(job: Path, machines: list[Machine], last_step: int) -> list[int]:
    """Until the trainer has ended; the explorer's command, which was stopped before."""
    wait_explored(job, last_step)
    root = job.parent.parent.parent
    stopped = set(processes_of(root, "mode=explore")) - set(processes_of(root, "tests.machine"))
    for process in stopped:
        os.kill(process, signal.SIGSTOP)
    wait_for(job, STARTED.format(kind="stage_finished"), machines)
    return sorted(stopped)


def run(root: Path, file: Path, place: str, moment: str, overrides: list[str]) -> dict[str, Any]:
    folders = {name: root / name for name in ("shared", "own")}
    job = folders["shared"] / "tests" / "nodes"
    command = [sys.executable, "-m", "trinity_data.cli.main", "run", str(file), *overrides]
    machines: list[Machine] = []

    def start(role: str, place: str, mode: str) -> Machine:
        own = {"TRINITY_CHECKPOINT_ROOT_DIR": str(folders[place]), "TRINITY_RUN_NAME": job.name}
        hidden = sorted(folder for name, folder in folders.items() if name != place)
        machines.append(Machine(CPUS[role], [*command, f"mode={mode}"], hidden=hidden, **own))
        return machines[-1]

    for folder in folders.values():
        folder.mkdir()
    with ray_nodes([0]):
        try:
            trainer = start("trainer", "shared", "train")
            wait_for(job, STARTED.format(kind="stage_started"), machines)
            explorer = start("explorer", place, "explore")
            stopped = list[int]()
            if moment.isdigit():
                wait_for(job, f"(select max(step) from steps) >= {moment}", machines)
            else:
                stopped = wait_end(job, machines, int(moment.removeprefix("end")))
            lost_at = rows_of(job, "select max(step) as step from evals")[0]["step"]
            trainer.lose()
            for process in stopped:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGCONT)
            again = start("trainer", "shared", "train")
            outcome = {"evaluated": lost_at, "trainer": again.outcome()}
            if outcome["trainer"]["code"] == 0:
                outcome["explorer"] = explorer.outcome()
            return outcome
        finally:
            for each in machines:
                each.lose()


if __name__ == "__main__":
    root, file, place, moment, *overrides = sys.argv[1:]
    print(json.dumps(run(Path(root), Path(file), place, moment, overrides)))
