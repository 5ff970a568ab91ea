"""Two commands one of whose processes stops for a while at random times, as where the network between them
stalls, and then goes on: nothing is lost or made twice, and nobody waits for `sync_timeout`.

TRINITY_PAIR_STALLS says how often; the kinds of processes take turns.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.launch.conftest import PAIR, RunPipeline, StartPart
from tests.launch.disturbed_run import COMMON, DisturbedRun
from tests.launch.test_pair import check_equal

pytestmark = pytest.mark.slow

STALLS = int(os.environ.get("TRINITY_PAIR_STALLS", 6))
SECONDS = 15.0, 40.0
"""Of a stall. A command without a sign of life for 30 loses its place."""
MOST_SECONDS_APART = 15.0
STEPS_A_STALL = 16


def test_what_stalled_goes_on_and_the_rows_are_those_of_one_process(
    start_part: StartPart, run_pipeline: RunPipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair, steps = tmp_path / "tests" / "pair", STEPS_A_STALL * STALLS
    overrides = f"buffer.total_steps={steps}", "buffer.total_epochs=100"
    start = {mode: partial(start_part, mode, "--quiet", *overrides) for mode in ("explore", "train")}
    run, stalled, kinds = DisturbedRun(tmp_path, start, random.Random(7)), list[str](), (*start, *COMMON)

    def stall() -> None:
        if len(stalled) == STALLS:
            return
        # one that is not there now is tried again
        what = kinds[len(stalled) % len(kinds)]
        if (process := run.send(what, signal.SIGSTOP)) is not None:
            time.sleep(run.chance.uniform(*SECONDS))
            # what others took for dead may have been killed
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)
            stalled.append(what)

    run.to_the_end(stall, most_seconds=MOST_SECONDS_APART)
    with capsys.disabled():
        print(f" {len(stalled)} stalls: {dict(Counter(stalled))}", flush=True)
    assert len(stalled) == STALLS
    check_equal(pair, run_pipeline(PAIR, tmp_path, "whole", *overrides), steps=steps)
    assert not any("has waited" in output for output in run.outputs)
