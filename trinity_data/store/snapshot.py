"""One moment of a store as files and tables: what SQL and the audit look at.

It stays readable while the writer goes on: Parquet files do not change, and mapped tails outlive their removal.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from trinity_data.errors import StoreError
from trinity_data.store.ledger import (
    LEDGER_FILE,
    is_in_use,
    naming,
    open_ended,
    open_for_reading,
    transaction,
)
from trinity_data.store.reading import SegmentFiles, SegmentVanishedError
from trinity_data.store.segments import SEALED, Segment, all_segments, check_content, check_size
from trinity_data.store.tables import STORED

_ATTEMPTS = 10
_T = TypeVar("_T")


@dataclass(frozen=True)
class Snapshot:
    """The rows of every table: sealed ones as Parquet files, the others in memory maps."""

    root: Path
    segments: list[Segment]
    sealed: dict[str, list[Path]]
    hot: dict[str, pa.Table]
    damaged: list[str]
    """What was set aside, in words. Damage inside a Parquet file shows when it is read, or by `verified`."""

    def damage(self) -> dict[Path, str]:
        """Compares every file with its checksum; what is wrong, by file."""
        damaged = {}
        for segment in self.segments:
            try:
                check_content(self.root, segment)
            except StoreError as error:
                # a tail that was sealed since is not damaged: its rows are in the memory maps
                if segment.kind == SEALED or str(error) in self.damaged:
                    damaged[(self.root / segment.file).resolve()] = str(error)
        return damaged

    def verified(self) -> Snapshot:
        """The part that is whole."""
        damaged = self.damage()
        sealed = {
            name: [file for file in files if file not in damaged] for name, files in self.sealed.items()
        }
        return replace(self, sealed=sealed, damaged=list(damaged.values()))


def store_folder(run: Path) -> Path:
    """The store of a job folder; the store's own folder will do as well."""
    for folder in (run / "store", run):
        if (folder / LEDGER_FILE).exists():
            return folder
    raise StoreError(f"{run} holds no run: there is no store/{LEDGER_FILE} in it")


def take_snapshot(root: Path) -> Snapshot:
    """What the ledger of the store in `root` knows now."""
    return snapshot_with(root, lambda ledger: None)[0]


def snapshot_with(root: Path, read: Callable[[sqlite3.Connection], _T]) -> tuple[Snapshot, _T]:
    """A snapshot and what `read` finds in the ledger at the same moment."""
    for _ in range(_ATTEMPTS):
        ended = not is_in_use(root)
        with closing(open_ended(root) if ended else open_for_reading(root)) as ledger, naming(root):
            with transaction(ledger, "DEFERRED"):
                segments = all_segments(ledger)
                found = read(ledger)
            snapshot = _load(root, segments)
            if ended and is_in_use(root):
                continue  # a writer came in between, and what was read may be mixed
            if not snapshot.damaged or _unchanged(ledger, segments):
                break
    return snapshot, found


def _load(root: Path, segments: list[Segment]) -> Snapshot:
    files = SegmentFiles(root)
    sealed: dict[str, list[Path]] = {name: [] for name in STORED}
    hot: dict[str, list[pa.Table]] = {name: [_empty(name)] for name in STORED}
    damaged = []
    for segment in segments:
        try:
            if segment.kind == SEALED:
                check_size(root, segment)
                sealed[segment.table].append((root / segment.file).resolve())
            else:
                hot[segment.table].append(files.whole(segment))
        except StoreError as error:
            damaged.append(str(error))
        except SegmentVanishedError:
            damaged.append(str(segment.damaged("the file is gone")))
    return Snapshot(
        root, segments, sealed, {name: pa.concat_tables(parts) for name, parts in hot.items()}, damaged
    )


def _unchanged(ledger: sqlite3.Connection, segments: list[Segment]) -> bool:
    """Whether the ledger still names these files; if not, one may merely have been sealed."""
    return {segment.file for segment in all_segments(ledger)} == {segment.file for segment in segments}


def _empty(name: str) -> pa.Table:
    return STORED[name].empty_table().replace_schema_metadata(None)
