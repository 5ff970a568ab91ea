"""Two commands whose machines disagree about the time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.launch.conftest import PAIR, RunPipeline, StartPart, rows_of
from tests.launch.test_pair import check_equal, ends, wait_for
from tests.store.disk import build_shim

pytestmark = pytest.mark.slow

SECONDS_AHEAD = 600
STEPS = 4


@pytest.mark.parametrize("first", ["explore", "train"])
def test_two_commands_whose_clocks_differ_by_ten_minutes_make_what_one_makes(
    start_part: StartPart, run_pipeline: RunPipeline, tmp_path: Path, first: str
) -> None:
    """The clock of the first one is ahead, with that of Ray and of the store, which it starts."""
    pair = tmp_path / "tests" / "pair"
    # the first one waits for the other's start
    overrides = f"buffer.total_steps={STEPS}", "synchronizer.sync_timeout=300"
    shim = build_shim(tmp_path, Path(__file__).with_name("clock.c"))
    ahead = {"LD_PRELOAD": str(shim), "SECONDS_AHEAD": str(SECONDS_AHEAD)}
    early = start_part(first, *overrides, more=ahead)
    wait_for(pair, "(select count(*) from events where kind = 'joined') > 0", early)
    late = start_part("train" if first == "explore" else "explore", *overrides)
    ends(early)
    ends(late)
    check_equal(pair, run_pipeline(PAIR, tmp_path, "whole", *overrides), steps=STEPS)
    kinds = rows_of(pair, "select kind from events where kind in ('joined', 'died', 'left')")
    assert Counter(row["kind"] for row in kinds) == {"joined": 2, "left": 2}
    (clocks,) = rows_of(
        pair,
        "select epoch(max(e.started_at) - min(s.started_at)) as apart from experiences e join steps s "
        "using (step) where step = 1",
    )
    # by one clock, rollouts are made before their step is trained
    assert clocks["apart"] > 0 if first == "explore" else clocks["apart"] < -SECONDS_AHEAD
