"""`make soak` in small, and that it can fail."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.store.disk_workload import commit
from tests.store.soak import held_by, soak
from trinity_data.store.store import Store


def test_writers_are_killed_and_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    count = soak(tmp_path, 6, seed=3)
    assert (count.kills, count.lost, count.doubled, count.wrong) == (6, 0, 0, [])


@pytest.mark.slow
def test_two_hundred_kills_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    count = soak(tmp_path, 200, seed=0)
    print(count)
    assert (count.kills, count.lost, count.doubled, count.wrong) == (200, 0, 0, [])
    assert count.acknowledged > 200


def test_a_store_that_lost_commits_is_found_out(tmp_path: Path) -> None:
    root, older = tmp_path / "store", tmp_path / "older"
    for number in range(6):
        store = Store.create_or_open(root)
        commit(store, number)
        store.close()
        if number == 3:
            shutil.copytree(root, older)
    assert held_by(root, 6) == "6 0"
    assert held_by(root, 5) == "6 0"  # whole before it was acknowledged
    assert held_by(older, 6) == "4 0"  # two are lost
