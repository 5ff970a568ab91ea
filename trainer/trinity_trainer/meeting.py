"""How the workers of a group find each other: by a file of this user's where all are on the node that starts
them, else by a store that the first of them offers on an address of its node.

A store of torch's own making listens on every interface, to everybody; this one listens on one address.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch._C._distributed_c10d import FileStore, Store, TCPStore  # not exported by `torch.distributed`

from trinity_data.loopback import LOOPBACK_ADDRESS
from trinity_data.placement import Node

_SIOCGIFADDR = 0x8915  # of linux/sockios.h


@dataclass(frozen=True)
class Meeting:
    """Where the workers meet."""

    file: str | None
    """None where `address` and `port` are of a store."""
    address: str
    """Of the first worker; loopback where all are on one node."""
    port: int = 0


def offer(file: Path, starter: Node, nodes: Sequence[Node]) -> tuple[Meeting, TCPStore | None]:
    """For the first worker, which keeps the store. `file` is on the node `starter`; `nodes` are those of the
    workers, the first one's first.
    """
    address = LOOPBACK_ADDRESS if len(set(nodes)) == 1 else nodes[0].address
    if set(nodes) == {starter}:
        return Meeting(str(file), address), None
    with socket.create_server((address, 0), backlog=max(128, len(nodes))) as listener:
        port = listener.getsockname()[1]
        store = TCPStore(
            address,
            port,
            len(nodes),
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()),
        )
    return Meeting(None, address, port), store


def meet(meeting: Meeting, node: Node, world_size: int) -> Store:
    """By which the workers tell each other their addresses. That of this one, which is on `node`, will be one
    that the others can reach.
    """
    interface = interface_of(LOOPBACK_ADDRESS if meeting.address == LOOPBACK_ADDRESS else node.address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if (for_engines_too := interface_of(node.address)) is not None:
        # NCCL asks once in a process, and the first one also sends weights to engines, perhaps on other nodes
        os.environ.setdefault("NCCL_SOCKET_IFNAME", for_engines_too)
    if meeting.file is not None:
        return FileStore(meeting.file, world_size)
    return TCPStore(meeting.address, meeting.port, world_size, is_master=False)


def interface_of(address: str) -> str | None:
    """The network interface that has the address, which is of IPv4; None where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
