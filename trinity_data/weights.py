"""Model versions: where the weights of a training step lie, and how they get from the trainer to the engines.

A version is a folder that is complete or not there: the ranks write it under another name, a transaction
records it, and then it is renamed.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from trinity_data.atomic import name_folder, remove, replace_text
from trinity_data.probe import Probe
from trinity_data.scratch import ScratchFolder


@dataclass(frozen=True)
class Weights:
    """The policy after training step `version`, as a Hugging Face folder."""

    version: int
    folder: str
    probe: Probe | None = None
    """What they say about a few token sequences, for an engine to be compared with."""


class WeightFolders:
    """Names the folder of each version.

    `memory` puts them into the node's shared memory, `checkpoint` on disk.
    """

    def __init__(self, job_dir: Path, method: str) -> None:
        self.method = method
        memory = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
        self._shared = ScratchFolder(memory) if method == "memory" else None
        self.root = job_dir / "weights" if self._shared is None else self._shared.path
        self.root.mkdir(parents=True, exist_ok=True)
        for draft in self.root.glob(".version_*"):
            remove(draft)  # of a run that was killed before it published it

    def path(self, version: int) -> Path:
        """Where `version` is or will be."""
        return self.root / f"version_{version}"

    def draft(self, version: int) -> Path:
        """Where `version` is written."""
        return self.root / f".version_{version}"

    def publish(self, version: int) -> None:
        """Gives the draft the name of the version, with everything in it durable."""
        name_folder(self.draft(version), self.path(version))

    def remove(self, *, before: int) -> None:
        """Removes the versions before one; an engine that has one mapped keeps its mapping."""
        for folder in self.root.glob("version_*"):
            if int(folder.name.removeprefix("version_")) < before:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Gives the shared memory back. Versions on disk stay."""
        if self._shared is not None:
            self._shared.close()


def mark_latest(job_dir: Path, step: int) -> None:
    """Names `step` as the newest checkpoint and the newest saved weights, for people and other tools."""
    replace_text(job_dir / "latest_checkpointed_iteration.txt", f"{step}")
    replace_text(job_dir / "latest_state_dict_iteration.txt", f"{step}")
    for part in ("explorer", "trainer"):
        replace_text(job_dir / f"{part}_meta.json", json.dumps({"latest_iteration": step}))
