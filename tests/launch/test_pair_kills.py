"""Two commands whose processes are killed at random moments, with what serves them both: Ray's raylet, the
process that hosts Ray, and the store's actor.

TRINITY_PAIR_KILLS says how often at most, TRINITY_KILL_SECONDS how long, and TRINITY_SECONDS_A_KILL how far
apart.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from tests.launch.conftest import PAIR, RunPipeline, StartPart
from tests.launch.disturbed_run import COMMON, DisturbedRun
from tests.launch.test_pair import check_equal

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("TRINITY_PAIR_KILLS", 200))
KILL_SECONDS = float(os.environ.get("TRINITY_KILL_SECONDS", 1800))
SECONDS_A_KILL = float(os.environ.get("TRINITY_SECONDS_A_KILL", 24))
"""At most: a command needs about ten until it makes steps."""
STEPS_A_KILL = 3


def test_what_was_killed_is_started_again_and_the_rows_are_those_of_one_process(
    start_part: StartPart, run_pipeline: RunPipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair, steps = tmp_path / "tests" / "pair", STEPS_A_KILL * KILLS
    overrides = f"buffer.total_steps={steps}", "buffer.total_epochs=100"
    start = {mode: partial(start_part, mode, "--quiet", *overrides) for mode in ("explore", "train")}
    run = DisturbedRun(tmp_path, start, random.Random(5))
    killed = run.killed((*start, *COMMON), kills=KILLS, seconds=KILL_SECONDS, most_seconds=SECONDS_A_KILL)
    with capsys.disabled():
        print(f" {len(killed)} kills: {dict(Counter(killed))}", flush=True)
    check_equal(pair, run_pipeline(PAIR, tmp_path, "whole", *overrides, seconds=400 + 2 * steps), steps=steps)
