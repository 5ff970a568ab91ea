"""A pair of commands on a disk that fills and has room again; test_full_disk.py mounts it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.launch.conftest import rows_of
from trinity_data.errors import StoreError

MEGABYTES = 300
MODES = ("explore", "train")


def start(mode: str, file: Path, root: Path, overrides: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trinity_data.cli.main", "run", str(file), f"mode={mode}", *overrides]
    own = {"TRINITY_CHECKPOINT_ROOT_DIR": str(root), "TRINITY_RUN_NAME": "pair"}
    output = subprocess.PIPE, subprocess.STDOUT
    return subprocess.Popen(command, env=os.environ | own, stdout=output[0], stderr=output[1], text=True)


def num_steps(job: Path) -> int:
    try:
        return int(rows_of(job, "select count(*) as steps from steps")[0]["steps"])
    except StoreError:
        return 0


def fill(disk: Path) -> None:
    """Takes what is free, also what was given back meanwhile."""
    with (disk / "filler").open("ab", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue


def main(file: Path, root: Path, overrides: list[str]) -> None:
    """Prints what each command said at its end, the full disk first."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "tmpfs", str(root)], check=True)
    job = root / "tests" / "pair"
    pair = [start(mode, file, root, overrides) for mode in MODES]
    while num_steps(job) < 2:
        assert all(process.poll() is None for process in pair), [each.communicate()[0] for each in pair]
        time.sleep(0.05)
    while any(process.poll() is None for process in pair):
        fill(root)
        time.sleep(0.2)
    for process in pair:
        print(f"full: rc {process.returncode}\n{process.communicate()[0]}")
    (root / "filler").unlink()
    for process in [start(mode, file, root, overrides) for mode in MODES]:
        said = process.communicate()[0]
        print(f"again: rc {process.returncode}\n{said}")
    subprocess.run(["cp", "-r", str(job), os.environ["FULL_DISK_COPY"]], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
