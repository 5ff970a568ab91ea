"""Processes forked from this one, which has imported everything already, so that they can be killed soon."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import IO

Send = Callable[[str], None]
Work = Callable[[Send], None]


def fork(work: Work) -> tuple[IO[str], int]:
    """A child that does `work` and ends; what it sends can be read from the file."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return os.fdopen(reading), pid
    code = 1
    try:
        work(lambda text: _send(writing, text))
        code = 0
    except BaseException as error:  # the boundary of the child: its parent reads why it ended
        os.write(writing, repr(error).encode())
    finally:
        os._exit(code)


def in_a_process(work: Work, wrong: list[str]) -> str:
    """What `work` sent; nothing when it raised, which is added to `wrong`."""
    output, pid = fork(work)
    with output:
        said = output.read().strip()
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
        wrong.append(said)
        return ""
    return said


def _send(descriptor: int, text: str) -> None:
    os.write(descriptor, text.encode())
