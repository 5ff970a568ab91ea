"""Names of files that a ledger may give: those that a store of ours writes,
below its own folder, and no links.

A ledger is a file that anybody may have made. What it names is checked before it is read,
shared, replaced or removed.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from trinity_data.errors import StoreError
from trinity_data.store.tables import STORED

SEGMENTS_FOLDER = "segments"

# 00000007.arrows, 00000007.3.parquet, merged 00000007-00000012.3.parquet, expired 00000007.3.4711.parquet
_NUMBERS = r"\d{8,20}(?:-\d{8,20})?(?:\.\d{1,20})*"
_SEGMENT = re.compile(rf"{SEGMENTS_FOLDER}/([a-z_]+)/{_NUMBERS}\.(arrows|parquet)", re.ASCII)
_MADE = re.compile(rf"{_NUMBERS}\.(?:arrows|parquet|parquet\.tmp)", re.ASCII)
_CHECKPOINT = re.compile(r"global_step_\d{1,18}", re.ASCII)


def check_segment(table: object, kind: object, file: object, numbers: tuple[object, ...]) -> None:
    """Refuses what the ledger says of a segment unless this store could have written it. Looks at no file."""
    named = _SEGMENT.fullmatch(file) if isinstance(file, str) else None
    extension = "parquet" if kind == "sealed" else "arrows"
    if named is None or table not in STORED or named.groups() != (table, extension):
        raise StoreError(
            f"the ledger names the file {file!r} as a {kind} segment of table {table!r}; "
            "a store's own files are called "
            f"{SEGMENTS_FOLDER}/TABLE/NUMBER.{extension}: the ledger is damaged or forged, "
            "and nothing was touched"
        )
    if not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
        raise StoreError(
            f"the ledger says of {file} that its rows, bytes and checksum are {numbers!r}; these are counts: "
            "the ledger is damaged or forged, and nothing was touched"
        )


def check_folders(root: Path) -> None:
    """Refuses a store whose folders of segments are links, which would lead out of it."""
    for folder in (root / SEGMENTS_FOLDER, *(root / SEGMENTS_FOLDER / table for table in STORED)):
        if folder.is_symlink():
            raise StoreError(
                f"{folder} is a link; files would be read, written and removed elsewhere. "
                "Move the whole job folder instead, and link that"
            )


def made_files(root: Path) -> list[str]:
    """Files below `root` that have a name as a writer gives it, relative to `root`.

    Links to files are listed too.
    """
    found = []
    for table in STORED:
        folder = root / SEGMENTS_FOLDER / table
        if folder.is_symlink() or not folder.is_dir():
            continue
        with os.scandir(folder) as entries:
            names = [
                e.name for e in entries if _MADE.fullmatch(e.name) and not e.is_dir(follow_symlinks=False)
            ]
        found += [f"{SEGMENTS_FOLDER}/{table}/{name}" for name in sorted(names)]
    return found


def file_size(path: Path) -> int:
    """Bytes of a file that is no link. Raises FileNotFoundError when there is none."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise StoreError(f"{path} is no plain file; a store does not follow links")
    return found.st_size


def check_checkpoint(path: object) -> str:
    """The name of a checkpoint's folder, which lies in the job folder; refuses every other path."""
    if isinstance(path, str) and _CHECKPOINT.fullmatch(path):
        return path
    raise StoreError(
        f"found {path!r} as the folder of a checkpoint; it must be global_step_N, a folder of the job folder"
    )
