"""`run.lock` of a job folder: one process that does everything holds it alone, processes that share a run
hold it together.

The kernel lets go of it when a process ends, however it ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trinity_data.errors import StoreLockedError

LOCK_FILE = "run.lock"
ENDING = "the Ray of this job, which is about to end"
"""What the lock says of its holder when waiting for it is worth while."""
ENDING_SECONDS = 60.0
# `is_held` takes the lock for an instant
_SECONDS = 0.5


@contextmanager
def hold(folder: Path, holder: str, *, shared: bool = False) -> Iterator[None]:
    """The lock of this job folder until the block ends; `holder` is what others read who are refused.

    Raises StoreLockedError where another process holds it alone, or where it shall be held alone and others
    hold it together.
    """
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        begin = time.monotonic()
        while not try_lock(descriptor, shared=shared):
            found = os.pread(descriptor, 200, 0).decode().strip()
            if time.monotonic() - begin > (ENDING_SECONDS if found == ENDING else _SECONDS):
                raise StoreLockedError(
                    f"{folder} is in use by {found or 'another process'}; wait for it, stop it, "
                    "or give this run another `name`"
                )
            time.sleep(0.02)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{holder}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def is_held(folder: Path) -> bool:
    """Whether a process has the lock. True also where this one may not look."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        return not try_lock(descriptor)
    except OSError:
        return True
    finally:
        os.close(descriptor)


def holder(folder: Path) -> str:
    """What the lock says of its last holder."""
    return (folder / LOCK_FILE).read_text().strip()


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Whether this process has the lock of an open file now."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return False
    return True
