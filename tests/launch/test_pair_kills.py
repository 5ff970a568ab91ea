"""Two commands whose processes are killed at random moments, with what serves them both: Ray's raylet, the
process that hosts Ray, and the store's actor.

TRINITY_PAIR_KILLS says how often at most, TRINITY_KILL_SECONDS how long.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.launch.conftest import PAIR, RunPipeline, StartPart, processes_of
from tests.launch.test_pair import check_equal

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("TRINITY_PAIR_KILLS", 200))
KILL_SECONDS = float(os.environ.get("TRINITY_KILL_SECONDS", 1800))
STEPS_A_KILL = 3
MODES = ("explore", "train")


def test_what_was_killed_is_started_again_and_the_rows_are_those_of_one_process(
    start_part: StartPart, run_pipeline: RunPipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair, steps = tmp_path / "tests" / "pair", STEPS_A_KILL * KILLS
    overrides, chance = (f"buffer.total_steps={steps}", "buffer.total_epochs=100"), random.Random(5)
    # quiet ones, since nobody reads their output before they end
    running: dict[str, subprocess.Popen[str]] = {}
    done, killed = set[str](), list[str]()
    end = time.monotonic() + KILL_SECONDS
    while len(done) < len(MODES):
        for mode in set(MODES) - done:
            process = running.get(mode)
            if process is not None and process.poll() is not None:
                output = process.communicate()[0]
                assert "Traceback" not in output, output
                done |= {mode} if process.returncode == 0 else set()
            if mode not in done and (process is None or process.poll() is not None):
                running[mode] = start_part(mode, "--quiet", *overrides)
        time.sleep(chance.uniform(0.5, 12))
        if len(killed) < KILLS and time.monotonic() < end:
            what = chance.choice([*MODES, "ray_host", "raylet/raylet", "StoreActor", "WorkerActor"])
            killed += kill(tmp_path, what, running, chance)
    with capsys.disabled():
        print(f" {len(killed)} kills: {sorted(killed)}", flush=True)
    check_equal(pair, run_pipeline(PAIR, tmp_path, "whole", *overrides, seconds=400 + 2 * steps), steps=steps)


def kill(
    root: Path, what: str, running: dict[str, subprocess.Popen[str]], chance: random.Random
) -> list[str]:
    """What was killed; nothing where there is no such process now."""
    numbers = [running[what].pid] if what in running else processes_of(root, what)
    if not numbers:
        return []
    try:
        os.kill(chance.choice(numbers), signal.SIGKILL)
    except ProcessLookupError:
        return []
    return [what]
