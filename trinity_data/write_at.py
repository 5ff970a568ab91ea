"""Bytes at a place of an open file, all of them."""

from __future__ import annotations

import os

import pyarrow as pa


def write_at(descriptor: int, content: bytes | memoryview | pa.Buffer, offset: int) -> None:
    """The system may write less than it is given. Raises OSError."""
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view, offset)
        offset += written
        view = view[written:]
