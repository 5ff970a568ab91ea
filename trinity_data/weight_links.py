"""The ends of a group that weights go through: of a rank, and of a worker of an engine.

By broadcast each tensor is one message. Through buffers a version is one string of bytes, all tensors one
behind the other, with which the ranks fill their buffers again and again: a tensor may be larger than a
buffer. All members meet when the buffers are full, and again when they were read, before which no rank
writes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

from trinity_data.gloo_group import GlooGroup, as_bytes
from trinity_data.weight_sending import TensorFormat


class WeightWriter(Protocol):
    """Of a rank. Raises RuntimeError where another member is gone."""

    def write(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None: ...

    def close(self) -> None: ...


class WeightReader(Protocol):
    """Of a worker. Raises RuntimeError where another member is gone."""

    def read(self, tensors: Iterable[TensorFormat]) -> Iterator[tuple[str, torch.Tensor]]:
        """Each in memory of its own."""
        ...

    def close(self) -> None: ...


class BroadcastWriter:
    """Of the first member, between CPUs."""

    def __init__(self, group: GlooGroup) -> None:
        self._group = group

    def write(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in tensors:
            self._group.broadcast(tensor)

    def close(self) -> None:
        self._group.destroy()


class BroadcastReader:
    """Between CPUs."""

    def __init__(self, group: GlooGroup) -> None:
        self._group = group

    def read(self, tensors: Iterable[TensorFormat]) -> Iterator[tuple[str, torch.Tensor]]:
        for each in tensors:
            tensor = torch.empty(each.shape, dtype=getattr(torch, each.dtype))
            self._group.broadcast(tensor)
            yield each.name, tensor

    def close(self) -> None:
        self._group.destroy()


class BufferWriter:
    """Fills a buffer."""

    def __init__(self, buffer: torch.Tensor, group: GlooGroup) -> None:
        self._buffer, self._group = buffer, group

    def write(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        free = self._buffer
        for _, tensor in tensors:
            data = as_bytes(tensor)
            while len(data):
                part = data[: len(free)]
                free[: len(part)].copy_(part)
                data, free = data[len(part) :], free[len(part) :]
                if not len(free):
                    free = self._hand_over()
        if len(free) < len(self._buffer):
            self._hand_over()

    def _hand_over(self) -> torch.Tensor:
        """The buffer, empty again."""
        _wait_for_copies(self._buffer)
        self._group.barrier()  # all are full
        self._group.barrier()  # all were read
        return self._buffer

    def close(self) -> None:
        self._group.destroy()


class BufferReader:
    """Reads what a rank fills a buffer with."""

    def __init__(self, buffer: torch.Tensor, group: GlooGroup) -> None:
        self._buffer, self._group = buffer, group

    def read(self, tensors: Iterable[TensorFormat]) -> Iterator[tuple[str, torch.Tensor]]:
        full = self._buffer[:0]
        for each in tensors:
            tensor = torch.empty(each.shape, dtype=getattr(torch, each.dtype), device=self._buffer.device)
            data = as_bytes(tensor)
            while len(data):
                if not len(full):
                    self._group.barrier()  # all are full
                    full = self._buffer
                part = full[: len(data)]
                data[: len(part)].copy_(part)
                data, full = data[len(part) :], full[len(part) :]
                if not len(full):
                    self._give_back()
            yield each.name, tensor
        if len(full):
            self._give_back()

    def _give_back(self) -> None:
        _wait_for_copies(self._buffer)
        self._group.barrier()  # all were read

    def close(self) -> None:
        self._group.destroy()


def _wait_for_copies(buffer: torch.Tensor) -> None:
    """A GPU makes them later."""
    if buffer.is_cuda:
        torch.cuda.current_stream(buffer.device).synchronize()
