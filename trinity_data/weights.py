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
from trinity_data.spare import keep_spare

NEWEST = "latest_state_dict_iteration.txt"
"""Names the newest version of the folder that it is in."""


@dataclass(frozen=True)
class Weights:
    """The policy after training step `version`, as a Hugging Face folder, or where the ranks hold it."""

    version: int
    folder: str
    """Empty where the ranks hold the version, and send it; see `weight_sending`."""
    probe: Probe | None = None
    """What they say about a few token sequences, for an engine to be compared with."""
    node: str = ""
    """The node of Ray's that has the folder; empty where every process has it."""

    @property
    def are_held(self) -> bool:
        """By the ranks; there is no folder."""
        return not self.folder


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
        """Gives the draft the name of the version. On disk it is durable then, and named as the newest."""
        name_folder(self.draft(version), self.path(version), durable=self._shared is None)
        if self._shared is None:
            replace_text(self.root / NEWEST, f"{version}")

    def remove(self, *, before: int) -> None:
        """Removes the versions before one; an engine that has one mapped keeps its mapping.

        Of those in memory the last one is kept as a spare for the next version to be written.
        """
        for folder in self.root.glob("version_*"):
            if int(folder.name.removeprefix("version_")) < before:
                if self._shared is None:
                    shutil.rmtree(folder, ignore_errors=True)
                else:
                    keep_spare(folder)

    def close(self) -> None:
        """Gives the shared memory back where nobody else has it. Versions on disk stay."""
        if self._shared is not None:
            self._shared.close()


class HeldVersions:
    """In the place of `WeightFolders` where the ranks hold the versions: the oldest that they are to hold."""

    method, node = "nccl", ""

    def __init__(self) -> None:
        self.oldest = 0

    def publish(self, version: int) -> None:
        """The ranks hold it from its training on."""

    def remove(self, *, before: int) -> None:
        """The ranks drop the versions before one when they take the next."""
        self.oldest = max(self.oldest, before)

    def close(self) -> None:
        """The ranks drop them when the next stage begins."""


def mark_latest(job_dir: Path, step: int) -> None:
    """Names `step` as the newest checkpoint and the newest saved weights, for people and other tools."""
    replace_text(job_dir / "latest_checkpointed_iteration.txt", f"{step}")
    replace_text(job_dir / NEWEST, f"{step}")
    for part in ("explorer", "trainer"):
        replace_text(job_dir / f"{part}_meta.json", json.dumps({"latest_iteration": step}))
