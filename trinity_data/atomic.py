"""Files and folders that appear whole or not at all, and are still there after a power cut.

Written aside under a name of this thread's own, synced, renamed, and the folder that holds the name synced.
"""

from __future__ import annotations

import ctypes
import glob
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h


def replace_file(target: Path) -> AbstractContextManager[Path]:
    """Gives a path to write to, which takes the place of `target` when the block ends.

    When it raises, what was there stays as it was.
    """
    return _written_aside(target, os.replace)


def new_file(target: Path) -> AbstractContextManager[Path]:
    """Gives a path to write to, which is called `target` when the block ends.

    Raises FileExistsError when there is one by then, also when another process made it meanwhile.
    """
    return _written_aside(target, os.link)


def new_folder(target: Path) -> AbstractContextManager[Path]:
    """Gives an empty folder, which is called `target` when the block ends, with everything in it durable.

    Raises OSError when `target` is a folder that has files.
    """
    return _written_aside(target, os.rename, folder=True)


def replace_folder(target: Path) -> AbstractContextManager[Path]:
    """As `new_folder`, in the place of a folder or file that is there.

    Where the file system cannot exchange two names, a crash at the very end may leave neither.
    """
    return _written_aside(target, _exchange_or_rename, folder=True)


def name_folder(folder: Path, target: Path, *, durable: bool = True) -> None:
    """Calls a folder that is written `target`, as `replace_folder` does; `durable` with everything in it."""
    if durable:
        _sync_and_name(folder, target, _exchange_or_rename)
    else:
        _exchange_or_rename(folder, target)
    remove(folder)


def replace_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Writes a small file so that a reader sees the old text or the new one, never a part.

    `mode` is of the file as it is made, less what the process's mask takes away.
    """
    with (
        replace_file(path) as partial,
        open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file,
    ):
        file.write(text)


def remove(path: Path) -> None:
    """Removes a file, a link or a folder with all it holds, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def fsync_path(path: Path) -> None:
    """Forces a file's content to disk, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _written_aside(
    target: Path, give_name: Callable[[Path, Path], None], *, folder: bool = False
) -> Iterator[Path]:
    """`give_name(partial, target)` puts what was written, and synced, at its place."""
    for abandoned in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
        if not _is_running(abandoned.name.rsplit("-", 2)[1]):
            remove(abandoned)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}-{threading.get_ident()}")
    remove(partial)  # what this thread left, or a link that somebody put there
    if folder:
        partial.mkdir(parents=True)
    try:
        yield partial
        _sync_and_name(partial, target, give_name)
    finally:
        remove(partial)


def _sync_and_name(partial: Path, target: Path, give_name: Callable[[Path, Path], None]) -> None:
    fsync_path(partial)
    for parent, folders, files in os.walk(partial):
        for name in (*folders, *files):
            fsync_path(Path(parent, name))
    give_name(partial, target)
    fsync_path(target.parent)


def _exchange_or_rename(partial: Path, target: Path) -> None:
    """What was at `target` is at `partial` then, or removed."""
    # the C library has it, Python's `os` has not
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)
    if exchange is None or exchange(
        _AT_FDCWD, os.fsencode(partial), _AT_FDCWD, os.fsencode(target), _RENAME_EXCHANGE
    ):
        remove(target)
        os.rename(partial, target)


def _is_running(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ValueError, ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
