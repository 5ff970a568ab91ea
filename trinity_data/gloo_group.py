"""A group of processes on CPUs, beside those that torch and vLLM have for themselves."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import (  # not exported by `torch.distributed`
    BarrierOptions,
    BroadcastOptions,
    ProcessGroupGloo,
    TCPStore,
)

# until all members are there, and for one tensor
TIMEOUT = timedelta(seconds=60)
# a member that has ended is known at once; one that comes may have gathered a whole model before
BARRIER_TIMEOUT = timedelta(minutes=10)


class Rendezvous:
    """Where the other members find the first one: a store of its own, on one address."""

    def __init__(self, address: str) -> None:
        self.address = address
        with socket.create_server((address, 0)) as listener:
            self.port = listener.getsockname()[1]
            self.store = TCPStore(
                address,
                self.port,
                None,
                is_master=True,
                wait_for_workers=False,
                timeout=TIMEOUT,
                master_listen_fd=os.dup(listener.fileno()),
            )


class GlooGroup:
    """Returns when all its members are there. RuntimeError where one is not, here and in what follows."""

    def __init__(self, store: TCPStore, member: int, size: int, *, address: str) -> None:
        """`address` is one of this machine that the other members can reach."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = TIMEOUT
        self._group: Any = ProcessGroupGloo(store, member, size, options)

    @classmethod
    def join(cls, address: str, port: int, member: int, size: int) -> GlooGroup:
        """For all but the first member, whose rendezvous is at `address` and `port`."""
        store = TCPStore(address, port, None, is_master=False, timeout=TIMEOUT)
        return cls(store, member, size, address=_own_address(address, port))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """From the first member into the tensors of the others, which are contiguous."""
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([as_bytes(tensor)], options).wait()

    def barrier(self) -> None:
        """Returns when all members have come to it."""
        options = BarrierOptions()
        options.timeout = BARRIER_TIMEOUT
        self._group.barrier(options).wait()

    def destroy(self) -> None:
        """Others that wait for this member hear of it."""
        self._group.shutdown()
        self._group = None  # which ends the connections


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, where the tensor is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _own_address(address: str, port: int) -> str:
    """Of this machine, as who is at `address` sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        any_socket.connect((address, port))  # sends nothing
        return str(any_socket.getsockname()[0])
