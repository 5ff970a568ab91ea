"""Weights that go over NCCL, in buffers that vLLM's workers take apart."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import torch

from trinity_data.weight_sending import SendingGroup


class NcclWriter:
    """Of the first member of a group, between GPUs."""

    def __init__(self, meeting: socket.socket, group: SendingGroup) -> None:
        """`meeting` listens where the other members look for this one."""
        # takes seconds, and is there where engines of vLLM are
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.utils.nccl import unpinned_nccl_env

        members = meet_workers(meeting, group)
        with unpinned_nccl_env():
            self._group: Any = PyNcclCommunicator(members, device=torch.cuda.current_device())

    def write(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        packed_nccl_broadcast_producer(
            iterator=tensors, group=self._group, src=0, post_iter_func=lambda named: named[1]
        )
        torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        self._group.destroy()


def meet_workers(meeting: socket.socket, group: SendingGroup) -> Any:
    """vLLM's `StatelessProcessGroup`, as its `trainer_init` makes it, which takes no socket that listens."""
    from vllm.distributed.utils import StatelessProcessGroup

    return StatelessProcessGroup.create(group.address, group.port, 0, group.size, listen_socket=meeting)
