"""Weights of another node: copied once into the memory of this one, through Ray's object store."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import ray
from filelock import FileLock
from ray import ObjectRef
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trinity_data.atomic import name_folder, remove
from trinity_data.errors import WeightsGoneError
from trinity_data.nodes import this_node
from trinity_data.scratch import SharedFolder
from trinity_data.spare import keep_spare, take_spare
from trinity_data.weights import Weights, node_folder, shared_memory
from trinity_data.write_at import write_at

PIECE_BYTES = 8 << 20
# those that wait, and those that are on their way or written: an object store may have no more than 80 MB
PIECES_AHEAD = 2
WRITERS = 3
Piece = tuple[str, int, np.ndarray[Any, np.dtype[np.uint8]]]
"""The name of a file, the place of the first byte, bytes."""


class NodeWeights:
    """For one engine: weights as folders that its node has. May be called from any thread."""

    def __init__(self) -> None:
        self._folders: dict[Path, SharedFolder] = {}

    @contextmanager
    def here(self, weights: Weights) -> Iterator[Weights]:
        """The weights with a folder of this node, which stays until the block ends.

        WeightsGoneError where the node that has them does not hand them over.
        """
        source = Path(weights.folder)
        if weights.node in ("", this_node()) or _can_be_seen(source):
            yield weights
            return
        if source.parent not in self._folders:
            self._folders[source.parent] = node_folder(source.parent, this_node())
        root = self._folders[source.parent].path
        target = root / source.name
        with ExitStack() as stack:
            with FileLock(root / "lock"):
                if not target.is_dir():
                    _fetch(weights, root / f".{source.name}")
                    name_folder(root / f".{source.name}", target, durable=False)
                stack.callback(os.close, _held(target, fcntl.LOCK_SH))
                for other in root.glob("version_*"):
                    if other != target:
                        _remove_unused(other)
            yield replace(weights, folder=str(target))

    def close(self) -> None:
        for folder in self._folders.values():
            folder.close()


def _can_be_seen(folder: Path) -> bool:
    """Whether it is in a file system that the nodes have in common."""
    return not folder.is_relative_to(shared_memory()) and folder.is_dir()


def _fetch(weights: Weights, draft: Path) -> None:
    remove(draft)  # of an engine that was killed
    draft.mkdir()
    there = NodeAffinitySchedulingStrategy(weights.node, soft=False)
    pieces = ray.remote(read_folder).options(
        num_cpus=0,
        max_retries=0,
        num_returns="streaming",
        _generator_backpressure_num_objects=PIECES_AHEAD,
        scheduling_strategy=there,
    )
    references, taking = pieces.remote(weights.folder), Lock()
    try:
        for name, num_bytes in ray.get(next(references)).items():
            _make_file(draft / name, num_bytes)
        with ThreadPoolExecutor(WRITERS, "weights") as writers:
            for written in [writers.submit(_write_pieces, references, taking, draft) for _ in range(WRITERS)]:
                written.result()
    except RayError as error:
        cause = str(error).strip().splitlines()[-1]
        raise WeightsGoneError(
            f"the weights of version {weights.version} are in {weights.folder} of node {weights.node[:8]}, "
            f"which does not hand them over: {cause}"
        ) from error


def read_folder(folder: str) -> Iterator[dict[str, int] | Piece]:
    """How many bytes each file has, then the files in pieces. Runs on the node that has the folder."""
    sizes = {file.name: file.stat().st_size for file in Path(folder).iterdir()}
    yield sizes
    for name in (name for name, num_bytes in sizes.items() if num_bytes):
        content = np.asarray(np.memmap(Path(folder, name), np.uint8, "r"))
        for offset in range(0, sizes[name], PIECE_BYTES):
            yield name, offset, content[offset : offset + PIECE_BYTES]


def _make_file(file: Path, num_bytes: int) -> None:
    take_spare(file)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as new:
        new.truncate(num_bytes)


def _write_pieces(references: Iterator[ObjectRef[Piece]], taking: Lock, draft: Path) -> None:
    """Until none is left; other threads do the same."""
    while True:
        with taking:
            reference = next(references, None)
        if reference is None:
            return
        name, offset, data = ray.get(reference)
        with (draft / name).open("r+b") as file:
            write_at(file.fileno(), data.data, offset)


def _held(folder: Path, lock: int) -> int:
    """A descriptor with a lock on the folder. Raises BlockingIOError where LOCK_NB does not get it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, lock)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_unused(folder: Path) -> None:
    """Unless an engine is reading it; one that has it mapped keeps its mapping."""
    with suppress(BlockingIOError):
        descriptor = _held(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        keep_spare(folder)
        os.close(descriptor)
