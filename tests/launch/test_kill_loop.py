"""Two hundred kills of explorer, trainer and writer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.kill_loop import kill_runs


@pytest.mark.slow
def test_two_hundred_kills_of_runs_change_neither_rows_nor_weights(tmp_path: Path) -> None:
    count = kill_runs(tmp_path, 200, steps=150, seed=0)
    print(count)
    assert (count.kills, count.wrong) == (200, [])
