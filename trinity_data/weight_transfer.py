"""Weights of another node: copied once into the memory of this one, through Ray's object store."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from filelock import FileLock
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trinity_data.atomic import name_folder, remove
from trinity_data.errors import EngineError
from trinity_data.nodes import this_node
from trinity_data.scratch import SharedFolder
from trinity_data.weights import Weights, node_folder, shared_memory

PIECE_BYTES = 16 << 20
# read ahead of what has arrived, in the object stores of both nodes
PIECES_AHEAD = 2
Piece = tuple[str, int, np.ndarray[Any, np.dtype[np.uint8]]]


class NodeWeights:
    """For one engine: weights as folders that its node has. May be called from any thread."""

    def __init__(self) -> None:
        self._folders: dict[Path, SharedFolder] = {}

    @contextmanager
    def here(self, weights: Weights) -> Iterator[Weights]:
        """The weights with a folder of this node, which stays until the block ends.

        EngineError where the node that has them does not hand them over.
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
    pieces = ray.remote(read_pieces).options(
        num_cpus=0,
        max_retries=0,
        num_returns="streaming",
        _generator_backpressure_num_objects=PIECES_AHEAD,
        scheduling_strategy=there,
    )
    try:
        for reference in pieces.remote(weights.folder):
            name, offset, data = ray.get(reference)
            _write(draft / name, offset, memoryview(data.data))
    except RayError as error:
        cause = str(error).strip().splitlines()[-1]
        raise EngineError(
            f"the weights of version {weights.version} are in {weights.folder} of node {weights.node[:8]}, "
            f"which does not hand them over: {cause}"
        ) from error


def read_pieces(folder: str) -> Iterator[Piece]:
    """The files of a folder in pieces: name, place of the first byte, bytes. Runs on the node that has it."""
    for file in sorted(Path(folder).iterdir()):
        for offset in range(0, file.stat().st_size, PIECE_BYTES):
            yield file.name, offset, np.fromfile(file, np.uint8, PIECE_BYTES, offset=offset)


def _write(file: Path, offset: int, data: memoryview) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        while data:
            written = os.pwrite(descriptor, data, offset)
            data, offset = data[written:], offset + written
    finally:
        os.close(descriptor)


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
        remove(folder)
        os.close(descriptor)
