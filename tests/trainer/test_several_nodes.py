"""Trainer workers and engines on several nodes of a cluster, and the loss of one of its nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.conftest import Ranks
from tests.trainer.test_worker import steps

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcome(tiny_model: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.trainer.several_nodes", str(tiny_model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return lines


def test_two_ranks_on_two_nodes_train_as_two_on_one_and_meet_at_an_address_of_their_nodes(
    outcome: dict[str, Any], ranks: Ranks
) -> None:
    assert sorted(outcome["ranks"]["nodes"]) == ["A", "B"]
    assert outcome["ranks"]["losses"] == [each["loss"] for each in steps(ranks, 2, 2)]
    # of gloo one each, and the store that the first offers
    assert outcome["ranks"]["sockets"] == [2, 1]


def test_ranks_send_weights_to_engines_on_other_nodes_at_an_address_of_their_node(
    outcome: dict[str, Any],
) -> None:
    assert outcome["ranks"]["sent"] == {"failure": "", "is_whole": True, "at_own": True}


def test_engines_of_a_lost_node_wait_for_room_elsewhere_and_say_what_is_missing(
    outcome: dict[str, Any],
) -> None:
    lost = outcome["lost"]
    assert sorted(lost["before"]) == ["A", "B"]
    assert lost["refused"] == (
        "2 × engine with 1 CPU: the cluster had no room for that in 2 seconds (synchronizer.sync_timeout); "
        "2 node(s): ADDRESS has 0 of 0 CPU free, ADDRESS has 0 of 1 CPU free; "
        "end what holds them, add nodes, or ask for fewer"
    )
    assert sorted(lost["after"]) == ["A", "C"]
