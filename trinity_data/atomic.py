"""Files and folders that appear whole or not at all, and are still there after a power cut.

Written aside under a name of this thread's own, synced, renamed, and the folder that holds the name synced.
"""

from __future__ import annotations

import glob
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replace_file(target: Path) -> Iterator[Path]:
    """Gives a path to write to, which takes the place of `target` when the block ends.

    When it raises, what was there stays as it was.
    """
    with _written_aside(target) as partial:
        yield partial
        fsync_path(partial)
        os.replace(partial, target)
    fsync_path(target.parent)


@contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """Gives a path to write to, which is called `target` when the block ends.

    Raises FileExistsError when there is one by then, also when another process made it meanwhile.
    """
    with _written_aside(target) as partial:
        yield partial
        fsync_path(partial)
        os.link(partial, target)
    fsync_path(target.parent)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Gives an empty folder, which is called `target` when the block ends, with everything in it durable.

    Raises OSError when `target` is a folder that has files.
    """
    with _written_aside(target) as partial:
        partial.mkdir(parents=True)
        yield partial
        _fsync_tree(partial)
        os.rename(partial, target)
    fsync_path(target.parent)


@contextmanager
def replace_folder(target: Path) -> Iterator[Path]:
    """As `new_folder`, in the place of a folder or file that is there.

    A crash at the very end may leave neither.
    """
    with _written_aside(target) as partial:
        partial.mkdir(parents=True)
        yield partial
        _fsync_tree(partial)
        remove(target)
        os.rename(partial, target)
    fsync_path(target.parent)


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
def _written_aside(target: Path) -> Iterator[Path]:
    for abandoned in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
        if not _is_running(abandoned.name.rsplit("-", 2)[1]):
            remove(abandoned)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}-{threading.get_ident()}")
    remove(partial)  # what this thread left, or a link that somebody put there
    try:
        yield partial
    finally:
        remove(partial)


def _is_running(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ValueError, ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _fsync_tree(root: Path) -> None:
    for folder, _, files in os.walk(root):
        for name in files:
            fsync_path(Path(folder, name))
        fsync_path(Path(folder))
