"""A run that begins as another one was: a job folder of its own, beside the first,
with the checkpoints up to there.

Nothing of the first run is written or locked, and both go their own ways afterwards.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from trinity_data.errors import StoreError
from trinity_data.store.branch import branch_store, link_tree
from trinity_data.store.snapshot import store_folder
from trinity_data.store.version import StoreVersion

ORIGIN_FILE = "branch.json"
# a model and a task set that the run had made for itself
MADE_INPUTS = "synthetic"
_FOLDER_NAME = re.compile(r"[\w][\w.+=@ -]*")


@dataclass(frozen=True)
class Branch:
    """What was made, and what it cost."""

    folder: Path
    num_experiences: int
    checkpoints: tuple[int, ...]
    linked_bytes: int
    """Shared with the run it was taken from."""
    written_bytes: int


def branch_run(run: Path, name: str, moment: StoreVersion) -> Branch:
    """Makes the job folder `name` beside `run`; whole or not at all."""
    root = store_folder(run)
    if not _FOLDER_NAME.fullmatch(name):
        raise StoreError(
            f"found {name!r}; a branch is a folder beside its run: letters, digits, '_', '-', '.'"
        )
    job = root.parent if root.name == "store" else root
    target = job.parent / name
    if target.exists():
        raise StoreError(f"{target} exists already; choose another name")
    partial = target.with_name(f".{name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        shared = branch_store(root, partial / "store", moment)
        taken = [MADE_INPUTS, *shared.checkpoints.values()]
        linked = sum(link_tree(job / path, partial / path) for path in taken)
        origin = {"run": f"{job.resolve().parent.name}/{job.resolve().name}", "moment": asdict(moment)}
        (partial / ORIGIN_FILE).write_text(json.dumps(origin, indent=1, sort_keys=True))
        os.replace(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Branch(
        target, shared.num_rows, tuple(shared.checkpoints), shared.linked_bytes + linked, shared.written_bytes
    )
