"""One process alone, or several together, and never both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trinity_data.errors import StoreLockedError
from trinity_data.job_lock import ENDING, hold, is_held

HOLDER = """
import sys
from pathlib import Path
from trinity_data.job_lock import hold
with hold(Path(sys.argv[1]), sys.argv[2], shared=sys.argv[3] == "shared"):
    print("held", flush=True)
    sys.stdin.readline()
"""


def start(folder: Path, holder: str, kind: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), holder, kind],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_several_share_a_job_that_one_alone_cannot_have_until_the_last_was_killed(tmp_path: Path) -> None:
    assert not is_held(tmp_path)
    others = [start(tmp_path, "explorers and a trainer", "shared") for _ in range(2)]
    with hold(tmp_path, "a third", shared=True):
        assert is_held(tmp_path)
    for process in others:
        assert is_held(tmp_path)
        with (
            pytest.raises(StoreLockedError, match="is in use by a third; wait for it, stop it, or give"),
            hold(tmp_path, "one alone"),
        ):
            pass
        process.kill()
        process.wait()
    assert not is_held(tmp_path)
    with hold(tmp_path, f"process {os.getpid()}"):
        assert is_held(tmp_path)


def test_a_holder_that_is_about_to_end_is_waited_for(tmp_path: Path) -> None:
    ending = start(tmp_path, ENDING, "alone")
    code = f"import time; time.sleep(1.5); import os; os.kill({ending.pid}, 9)"
    killer = subprocess.Popen([sys.executable, "-c", code])
    with hold(tmp_path, "the next", shared=True):
        assert (tmp_path / "run.lock").read_text() == "the next\n"
    ending.wait()
    killer.wait()
