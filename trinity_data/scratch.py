"""Folders for what lives as long as a process: readable by this user alone,
under a name that nobody can foresee.

The process holds a lock on its folder, so that what one left that was killed is known
and removed by the next.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "trinity-data-of-"
_log = logging.getLogger(__name__)


class ScratchFolder:
    """A new folder in `base`, mode 0700; gone with `close`."""

    def __init__(self, base: Path) -> None:
        remove_left_behind(base)
        while True:
            # another start may take it for one that was left, until it is locked
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
            try:
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                continue
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            if self.path.exists():
                return
            os.close(self._descriptor)

    def close(self) -> None:
        """May be called twice."""
        if self._descriptor >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._descriptor)
            self._descriptor = -1


class SharedFolder:
    """A folder in `base` that processes of one user have in common, mode 0700; gone when the last of them
    has closed it, and after a kill with the next start of any.
    """

    def __init__(self, base: Path, key: str) -> None:
        remove_left_behind(base)
        self.path = base / f"{_PREFIX}{key}"
        while True:
            self.path.mkdir(mode=0o700, exist_ok=True)
            try:
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue
            if os.fstat(self._descriptor).st_uid != os.geteuid():
                raise PermissionError(f"{self.path} is another user's; remove it")
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)
            with suppress(FileNotFoundError):
                if self.path.samefile(f"/proc/self/fd/{self._descriptor}"):
                    return
            os.close(self._descriptor)  # the last one that had it removed it, before it was locked

    def close(self) -> None:
        """May be called twice."""
        if self._descriptor >= 0:
            with suppress(BlockingIOError):
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._descriptor)
            self._descriptor = -1


def remove_left_behind(base: Path) -> None:
    """Removes this user's folders whose process has ended, however it ended.

    Those of others are left alone.
    """
    for folder in base.glob(f"{_PREFIX}*"):
        # gone meanwhile, a link, somebody else's, or locked by its process
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                    _log.info("removed %s, which a process left behind", folder)
            finally:
                os.close(descriptor)
