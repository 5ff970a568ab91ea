"""The disk of the job folder fills under two commands: each ends with the reason, and goes on where there is
room again.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.conftest import PAIR, RunPipeline
from tests.launch.test_pair import check_equal

pytestmark = pytest.mark.slow

STEPS = 12
# neither weights nor checkpoints are written before the end
STORE_ALONE = ("synchronizer.sync_interval=12", "trainer.save_interval=100")


def has_own_mounts() -> bool:
    """Whether this user may mount, in a namespace that nobody else sees."""
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return shutil.which("unshare") is not None and subprocess.run(command, check=False).returncode == 0


@pytest.mark.parametrize("overrides", [(), STORE_ALONE], ids=["weights", "store"])
def test_a_full_disk_ends_both_commands_with_the_reason_and_they_go_on_where_it_has_room(
    overrides: tuple[str, ...], run_environment: dict[str, str], run_pipeline: RunPipeline, tmp_path: Path
) -> None:
    if not has_own_mounts():
        pytest.skip("needs `unshare -rm`, to mount a small disk")
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    command = [
        *("unshare", "-rm", sys.executable, "-m", "tests.launch.full_disk", str(PAIR), str(disk)),
        *(f"buffer.total_steps={STEPS}", "synchronizer.sync_timeout=90", *overrides),
    ]
    done = subprocess.run(
        command,
        env=os.environ | run_environment | {"FULL_DISK_COPY": str(copy)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout, done.stdout
    full, again = done.stdout.split("again: ", 1)
    assert re.findall(r"full: rc (\d+)", full) == ["1", "1"], full
    assert "No space left on device" in full or "disk is full" in full, full
    assert re.findall(r"rc (\d+)", again) == ["0", "0"], again
    whole = run_pipeline(PAIR, tmp_path, "whole", f"buffer.total_steps={STEPS}", *overrides)
    check_equal(copy, whole, steps=STEPS)
