"""Model versions: where the weights of a training step lie, and how they get from the trainer to the engines.

A version is a folder that is complete or not there: the ranks write it under another name, a transaction
records it, and then it is renamed. In shared memory the folders lie in one that all processes of a job on a
node hold, so that they outlive a trainer that is killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from trinity_data.atomic import name_folder, remove, replace_text
from trinity_data.probe import Probe
from trinity_data.scratch import SharedFolder


@dataclass(frozen=True)
class Weights:
    """The policy after training step `version`, as a Hugging Face folder."""

    version: int
    folder: str
    probe: Probe | None = None
    """What they say about a few token sequences, for an engine to be compared with."""
    node: str = ""
    """The node of Ray's that has the folder; empty where every process has it."""


def shared_memory() -> Path:
    """Of this machine, as a folder."""
    return Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())


def node_folder(source: Path, node: str) -> SharedFolder:
    """The folder in the shared memory of this node, whose id is `node`, for the versions of `source`: a job,
    or what another node has of it.
    """
    digest = hashlib.blake2b(os.fsencode(source.resolve()), digest_size=8).hexdigest()
    return SharedFolder(shared_memory(), f"{node}-{digest}")


class WeightFolders:
    """Names the folder of each version.

    `memory` puts them into the shared memory of this node, whose id is `node`, `checkpoint` on disk.
    """

    def __init__(self, job_dir: Path, method: str, node: str = "") -> None:
        self.method, self.node = method, node
        self._shared = node_folder(job_dir, node) if method == "memory" else None
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
        """Gives the draft the name of the version, on disk with everything in it durable."""
        name_folder(self.draft(version), self.path(version), durable=self._shared is None)

    def remove(self, *, before: int) -> None:
        """Removes the versions before one; an engine that has one mapped keeps its mapping."""
        for folder in self.root.glob("version_*"):
            if int(folder.name.removeprefix("version_")) < before:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Gives the shared memory back where nobody else has it. Versions on disk stay."""
        if self._shared is not None:
            self._shared.close()


def mark_latest(job_dir: Path, step: int) -> None:
    """Names `step` as the newest checkpoint and the newest saved weights, for people and other tools."""
    replace_text(job_dir / "latest_checkpointed_iteration.txt", f"{step}")
    replace_text(job_dir / "latest_state_dict_iteration.txt", f"{step}")
    for part in ("explorer", "trainer"):
        replace_text(job_dir / f"{part}_meta.json", json.dumps({"latest_iteration": step}))
