"""What a process of a workflow prints, into the run's log, with the workflow's name and bounded."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import IO

log = logging.getLogger(__name__)

WINDOW_SECONDS = 60.0
MAX_BYTES_A_WINDOW = 16_384
MAX_LINE = 500


async def log_output(pipe: IO[bytes], name: str) -> None:
    """Reads until the process closes it.

    Beyond some kilobytes a minute, only how much there was is logged.
    """
    reader = asyncio.StreamReader(limit=2**16)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    began, logged, passed_over, unfinished = time.monotonic(), 0, 0, b""
    try:
        while block := await reader.read(2**16):
            if time.monotonic() - began > WINDOW_SECONDS:
                _say_passed_over(name, passed_over)
                began, logged, passed_over = time.monotonic(), 0, 0
            *lines, unfinished = (unfinished + block).split(b"\n")
            unfinished = unfinished[-MAX_LINE:]
            for line in lines:
                if logged > MAX_BYTES_A_WINDOW:
                    passed_over += len(line)
                    continue
                logged += len(line)
                text = line.decode("utf-8", "replace")[:MAX_LINE]
                # control characters would reach the terminal in which the log is read
                log.info("%s: %s", name, "".join(c if c.isprintable() or c == "\t" else "�" for c in text))
    finally:
        _say_passed_over(name, passed_over)
        transport.close()


def _say_passed_over(name: str, num_bytes: int) -> None:
    if num_bytes:
        log.info("%s: %d more bytes were printed and are not shown", name, num_bytes)
