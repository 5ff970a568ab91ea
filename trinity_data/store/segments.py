"""The files that hold rows: what the ledger says of them, and whether they are as it says.

A ledger is a file that anybody may have made. What it names is checked before it is read, shared, replaced or
removed: only files that a store of ours writes, below its own folder, and no links.
"""

from __future__ import annotations

import errno
import os
import re
import sqlite3
import stat
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trinity_data.atomic import fsync_path
from trinity_data.errors import StoreError
from trinity_data.schema import STORED

SEGMENTS_FOLDER = "segments"

# 00000007.arrows, 00000007.3.parquet, merged 00000007-00000012.3.parquet, expired 00000007.3.4711.parquet
_NUMBERS = r"\d{8,20}(?:-\d{8,20})?(?:\.\d{1,20})*"
_SEGMENT = re.compile(rf"{SEGMENTS_FOLDER}/([a-z_]+)/{_NUMBERS}\.(arrows|parquet)", re.ASCII)
_MADE = re.compile(
    rf"{_NUMBERS}\.(?:arrows|parquet)|\.{_NUMBERS}\.parquet\.partial-[\d-]{{1,40}}",  # the last, half written
    re.ASCII,
)
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
    files = []
    for table in STORED:
        folder = root / SEGMENTS_FOLDER / table
        if folder.is_symlink() or not folder.is_dir():
            continue
        with os.scandir(folder) as entries:
            names = [
                e.name for e in entries if _MADE.fullmatch(e.name) and not e.is_dir(follow_symlinks=False)
            ]
        files += [f"{SEGMENTS_FOLDER}/{table}/{name}" for name in sorted(names)]
    return files


def file_size(path: Path) -> int:
    """Bytes of a file that is no link. Raises FileNotFoundError when there is none."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise StoreError(f"{path} is no plain file; a store does not follow links")
    return status.st_size


def check_checkpoint(path: object) -> str:
    """The name of a checkpoint's folder, which lies in the job folder; refuses every other path."""
    if isinstance(path, str) and _CHECKPOINT.fullmatch(path):
        return path
    raise StoreError(
        f"found {path!r} as the folder of a checkpoint; it must be global_step_N, a folder of the job folder"
    )


TAIL, CLOSED, SEALED = "tail", "closed", "sealed"

# a query pays for each group, and who reads a few rows decodes whole groups
ROW_GROUP_BYTES = 32 << 20
ROW_GROUP_ROWS = 122_880
# one is put together of so many parts, so that little more than one is in memory
PARTS_OF_GROUP = 4

# of a folder that we may not read, cannot write, or that has no such call: we did not make what is in it
_NOT_OURS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL, errno.ENOTSUP}
SEGMENT_COLUMNS = "segment, table_name, kind, file, first_row, num_rows, num_bytes, checksum, num_final"


@dataclass(frozen=True)
class Segment:
    """One file of a table as the ledger knows it; bytes beyond `num_bytes` do not count."""

    number: int
    table: str
    kind: str
    """`tail` grows, `closed` waits to be sealed (both Arrow streams), `sealed` is Parquet."""
    file: str
    """Relative to the store's folder."""
    first_row: int
    num_rows: int
    num_bytes: int
    checksum: int
    num_final: int = 0
    """Of how many experiences a sealed file says what finally became of them."""

    @property
    def end_row(self) -> int:
        return self.first_row + self.num_rows

    def damaged(self, reason: str) -> StoreError:
        """The one wording for a file that cannot be trusted."""
        rows = f"rows {self.first_row} to {self.end_row - 1} of {self.table!r}"
        why = " ".join(reason.split())
        return StoreError(f"segment {self.file} is damaged: {why}; {rows} cannot be read, all others can")


def segments_of(
    connection: sqlite3.Connection, table: str, *, first_row: int = 0, end_row: int | None = None
) -> list[Segment]:
    """The segments that hold rows `first_row` up to `end_row`, in order."""
    rows = connection.execute(
        f"SELECT {SEGMENT_COLUMNS} FROM segments WHERE table_name = ? AND first_row + num_rows > ? "
        "AND first_row < ? ORDER BY first_row, segment",
        (table, first_row, 2**62 if end_row is None else end_row),
    )
    return [_recorded(row) for row in rows.fetchall()]


def all_segments(connection: sqlite3.Connection) -> list[Segment]:
    """Every segment, empty tails included, by table and in order."""
    rows = connection.execute(
        f"SELECT {SEGMENT_COLUMNS} FROM segments ORDER BY table_name, first_row, segment"
    )
    return [_recorded(row) for row in rows.fetchall()]


def replace_segment(connection: sqlite3.Connection, segment: Segment, sealed: Segment) -> bool:
    """Names the file of `sealed` in place of that of `segment`; False where the ledger names another one."""
    of_sealed = (sealed.kind, sealed.file, sealed.num_bytes, sealed.checksum, sealed.num_final)
    replaced = connection.execute(
        "UPDATE segments SET kind = ?, file = ?, num_bytes = ?, checksum = ?, num_final = ? "
        "WHERE segment = ? AND kind = ? AND file = ?",
        (*of_sealed, segment.number, segment.kind, segment.file),
    )
    return replaced.rowcount == 1


def _recorded(row: tuple[Any, ...]) -> Segment:
    """A segment as the ledger has it; refuses one that names a file which is none of the store's."""
    number, table, kind, file, *counts = row
    check_segment(table, kind, file, (number, *counts))
    return Segment(*row)


def check_size(root: Path, segment: Segment) -> None:
    """Refuses a file that is missing or shorter than the ledger says."""
    try:
        size = file_size(root / segment.file)
    except FileNotFoundError:
        raise segment.damaged("the file is gone") from None
    if size < segment.num_bytes or (segment.kind == SEALED and size != segment.num_bytes):
        raise segment.damaged(f"it has {size:,} bytes, the ledger says {segment.num_bytes:,}")


def check_content(root: Path, segment: Segment) -> None:
    """Refuses a file whose bytes are not those that were written; reads all of it."""
    check_size(root, segment)
    checksum = file_checksum(root / segment.file, segment.num_bytes)
    if checksum != segment.checksum:
        raise segment.damaged(f"its checksum is {checksum:08x}, the ledger says {segment.checksum:08x}")


def file_checksum(path: Path, num_bytes: int) -> int:
    """CRC-32 of the first `num_bytes` of a file."""
    checksum = 0
    with path.open("rb") as file:
        while num_bytes > 0 and (block := file.read(min(num_bytes, 1 << 20))):
            checksum = zlib.crc32(block, checksum)
            num_bytes -= len(block)
    return checksum


def fsync_ancestors(path: Path) -> None:
    """Makes a folder's own path durable.

    What exists may never have been synced: its maker may have been killed.
    """
    for folder in path.absolute().parents:
        try:
            fsync_path(folder)
        except OSError as error:
            if error.errno not in _NOT_OURS:
                raise
            return


def num_row_groups(num_rows: int, num_bytes: int) -> int:
    """Of equal size: a small one at the end would cost a query as much as a large one."""
    return max(1, round(num_bytes / ROW_GROUP_BYTES), -(-num_rows // ROW_GROUP_ROWS))
