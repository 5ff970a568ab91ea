"""Bytes that a process hands to another one of its machine without sending them: it writes them to memory
that both have.

The memory has no name in any folder, so that it goes with the processes, however they end.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence

import pyarrow as pa

from trinity_data.write_at import write_at

Parts = Sequence[bytes | pa.Buffer]
"""Bytes in pieces that follow each other."""

_GROWTH_BYTES = 1 << 20


class SharedBytes:
    """The side that writes; the other one gets `descriptor` whenever the memory has grown."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("store-write", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # who has it mapped would else end with a signal
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.size = 0

    def write(self, parts: Parts) -> int:
        """How many bytes they are. They take the place of those before, which nobody may read any more."""
        num_bytes = sum(map(len, parts))
        if num_bytes > self.size:
            self.size = -(-num_bytes // _GROWTH_BYTES) * _GROWTH_BYTES
            os.ftruncate(self.descriptor, self.size)
        offset = 0
        for part in parts:
            write_at(self.descriptor, part, offset)
            offset += len(part)
        return num_bytes

    def close(self) -> None:
        """Who has it mapped may read on."""
        os.close(self.descriptor)


def mapped(descriptor: int) -> pa.Buffer:
    """Memory of another process as it will be; closes the descriptor. Refuses a file that may shrink."""
    try:
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise PermissionError("memory that another process could take away is not read")
        return pa.py_buffer(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
    finally:
        os.close(descriptor)
