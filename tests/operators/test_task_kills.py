"""Task streams whose processes are killed: no row is skipped, and none is filtered twice.

TRINITY_WORKER_KILLS and TRINITY_RUN_KILLS say how often at most, TRINITY_KILL_SECONDS how long the first.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import ray

from tests.operators.test_task_workers import (
    CHAIN,
    nothing_left,
    read_tasks,
    rows_read,
    spec_of,
    stored,
    stream_workers,
)
from trinity_data.errors import OperatorError
from trinity_data.status import Status
from trinity_data.store.store import Store
from trinity_operators.task_chunks import StreamSpec
from trinity_operators.task_pipeline import TaskStream, stored_tasks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_session")]

WORKER_KILLS = int(os.environ.get("TRINITY_WORKER_KILLS", 200))
RUN_KILLS = int(os.environ.get("TRINITY_RUN_KILLS", 4))
KILL_SECONDS = float(os.environ.get("TRINITY_KILL_SECONDS", 480))
ROWS_A_KILL = 150
"""No session comes to the end of so many, where there would be no worker left."""


def check_store(spec: StreamSpec, folder: Path) -> None:
    """The rest of the stream comes, and the store then holds what it does without kills."""
    in_process = spec.pipeline.model_copy(update={"execution": "in_process", "num_process": 1})
    expected = read_tasks(replace(spec, pipeline=in_process), folder / "in_process")
    assert read_tasks(spec, folder / "store") == expected
    for table in ("tasks", "decisions"):
        assert stored(folder / "store", table).equals(stored(folder / "in_process", table)), table


def test_after_kills_of_any_worker_no_row_is_skipped_or_filtered_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    num_rows = ROWS_A_KILL * WORKER_KILLS + 1000
    # one operator is slow at random, one saves a state that is a value, and one a state that grows
    chain = [("./own.py:Saved", args) if "Numbered" in name else (name, args) for name, args in CHAIN]
    spec, chance = spec_of(tmp_path, *chain, num_process=4, num_rows=num_rows), random.Random(3)
    num_killed, end = 0, time.monotonic() + KILL_SECONDS
    others = list[str]()
    while num_killed < WORKER_KILLS and time.monotonic() < end:
        killed = list[int]()
        error = asyncio.run(_error_of_kill(spec, tmp_path / "store", chance, killed))
        assert error, num_killed
        assert rows_read(tmp_path / "store") < num_rows, num_killed
        num_killed += bool(killed)
        others += [] if killed else [error]
    read = f"{rows_read(tmp_path / 'store')} of {num_rows} rows"
    with capsys.disabled():
        print(f" {num_killed} kills, {read} read before the last session", flush=True)
        print(f" {len(others)} sessions failed without a kill: {others[:3]}", flush=True)
    check_store(spec, tmp_path)


async def _error_of_kill(spec: StreamSpec, folder: Path, chance: random.Random, killed: list[int]) -> str:
    """Ends one of the stream's processes while they start, or when 1 to 60 new tasks were taken, and goes on
    until the stream fails; "" where it does not.
    """
    store = Store.create_or_open(folder)
    stream = TaskStream(spec, store, window=64, status=Status("run"))
    try:
        stream.start()
        num_new = chance.choice([0, chance.randint(1, 60)])
        if not num_new:
            await asyncio.sleep(chance.uniform(0, 6))
        # those of earlier sessions come also from a stream that has failed since
        for _ in range(len(stored_tasks(store, spec)) + num_new):
            assert await asyncio.wait_for(stream.next(), 600) is not None
        for number in count():
            # it may have been a reader of the stream before, and then the next one is ended
            if number % 200 == 0:
                killed += await asyncio.to_thread(kill_a_worker, chance)
            if await asyncio.wait_for(stream.next(), 600) is None:
                break
            # the other workers read only so far ahead of what is taken
            await asyncio.sleep(0.01)
    except OperatorError as error:
        return str(error)
    finally:
        await stream.close()
        store.close()
        # else the next kill may be of a process of this stream
        await asyncio.to_thread(nothing_left)
    return ""


def kill_a_worker(chance: random.Random) -> list[int]:
    """Its number; none where the stream has no process for 20 seconds, as after one that failed before.

    Waits for one, because Ray names a process a little after it has given it a task.
    """
    end = time.monotonic() + 20
    while not (workers := sorted(stream_workers())):
        if time.monotonic() > end:
            return []
        time.sleep(0.01)
    worker = chance.choice(workers)
    os.kill(worker, signal.SIGKILL)
    return [worker]


RUN = """
import pickle, sys
from pathlib import Path
import ray
from tests.operators.test_task_workers import read_tasks
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
folder = Path(sys.argv[2])
read_tasks(pickle.loads((folder / "spec").read_bytes()), folder / "store", window=64, note=print, pause=0.01)
"""


def test_after_kills_of_the_run_no_row_is_skipped_or_filtered_twice(tmp_path: Path) -> None:
    num_rows = ROWS_A_KILL * RUN_KILLS + 1000
    # one of its operators saves nothing, so that rows are shown again
    spec, chance = spec_of(tmp_path, *CHAIN, num_process=4, num_rows=num_rows), random.Random(3)
    (tmp_path / "spec").write_bytes(pickle.dumps(spec))
    for _ in range(RUN_KILLS):
        command = [sys.executable, "-uc", RUN, ray.get_runtime_context().gcs_address, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None and run.stderr is not None
            for _ in range(chance.randint(1, 60)):
                assert run.stdout.readline(), run.stderr.read()
            run.kill()
    assert rows_read(tmp_path / "store") < num_rows
    check_store(spec, tmp_path)
