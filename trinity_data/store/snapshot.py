"""One moment of a store as files and tables: what SQL and the audit look at.

It stays readable while the writer goes on: Parquet files do not change,
and mapped tails outlive their removal.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from trinity_data.errors import StoreError
from trinity_data.store.ledger import (
    LEDGER_FILE,
    is_in_use,
    naming_errors,
    open_ended,
    open_for_reading,
    transaction,
)
from trinity_data.store.segment_reader import SegmentFiles, SegmentVanishedError
from trinity_data.store.segments import SEALED, Segment, all_segments, check_content, check_size
from trinity_data.store.tables import STORED

# rows that say how a step ended come after its batch was formed, and are known by the step they name
STEP_COLUMNS = {"batches": "step", "steps": "step", "evals": "step", "model_versions": "version"}

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
    cut: dict[Path, int] = field(default_factory=dict)
    """Sealed files of which only so many rows count, as of an earlier moment."""
    lengths: Mapping[str, int] = field(default_factory=dict)
    """How many rows of each table count; a table that is not named is empty."""
    final: Mapping[Path, bool] = field(default_factory=dict)
    """Sealed files that say what finally became of their rows, and whether of all;
    of an earlier moment none says it.
    """
    as_of: int | None = None
    """The step at whose end the run is shown; of the tables in STEP_COLUMNS,
    later rows are in the files still.
    """

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
        snapshot, damaged = self, self.damage()
        while (renewed := snapshot.renewed()) is not None:
            snapshot, damaged = renewed, renewed.damage()
        sealed = {
            name: [file for file in files if file not in damaged] for name, files in snapshot.sealed.items()
        }
        return replace(snapshot, sealed=sealed, damaged=list(damaged.values()))

    def misses_files(self) -> bool:
        return not all(
            (self.root / segment.file).exists() for segment in self.segments if segment.kind == SEALED
        )

    def renewed(self) -> Snapshot | None:
        """The same rows in other files, when some were merged since.

        None when all are where they were, or nowhere.
        """
        if not self.misses_files():
            return None
        newer = replace(_take(self.root, lambda ledger: (self.lengths, None))[0], as_of=self.as_of)
        return None if newer.sealed == self.sealed else newer


def store_folder(run: Path) -> Path:
    """The store of a job folder; the store's own folder will do as well."""
    for folder in (run / "store", run):
        if (folder / LEDGER_FILE).exists():
            return folder
    raise StoreError(f"{run} holds no run: there is no store/{LEDGER_FILE} in it")


def take_snapshot(root: Path, *, as_of: int | None = None) -> Snapshot:
    """What the ledger of the store in `root` knows now, or knew at the end of step `as_of`."""
    return snapshot_with(root, lambda ledger: None, as_of=as_of)[0]


def snapshot_with(
    root: Path, read: Callable[[sqlite3.Connection], _T], *, as_of: int | None = None
) -> tuple[Snapshot, _T]:
    """A snapshot and what `read` finds in the ledger at the same moment."""

    def look(ledger: sqlite3.Connection) -> tuple[Mapping[str, int] | None, _T]:
        return None if as_of is None else _lengths(ledger, as_of), read(ledger)

    snapshot, found = _take(root, look)
    return replace(snapshot, as_of=as_of), found


def _take(
    root: Path, look: Callable[[sqlite3.Connection], tuple[Mapping[str, int] | None, _T]]
) -> tuple[Snapshot, _T]:
    """A snapshot of tables of these lengths, or of all there is for None,
    and what else was seen in the ledger.
    """
    for _ in range(_ATTEMPTS):
        ended = not is_in_use(root)
        with closing(open_ended(root) if ended else open_for_reading(root)) as ledger, naming_errors(root):
            with transaction(ledger, "DEFERRED"):
                segments = all_segments(ledger)
                lengths, found = look(ledger)
            snapshot = _load(root, segments, lengths)
            if ended and is_in_use(root):
                continue  # a writer came in between, and what was read may be mixed
            if not snapshot.damaged or _unchanged(ledger, segments):
                break
    return snapshot, found


def _load(root: Path, segments: list[Segment], lengths: Mapping[str, int] | None) -> Snapshot:
    files = SegmentFiles(root)
    counted = {segment: _num_counted(segment, lengths) for segment in segments}
    counted = {segment: number for segment, number in counted.items() if number > 0}
    sealed: dict[str, list[Path]] = {name: [] for name in STORED}
    hot: dict[str, list[pa.Table]] = {name: [_empty(name)] for name in STORED}
    cut, final, damaged = {}, {}, []
    for segment, num_rows in counted.items():
        try:
            if segment.kind == SEALED:
                check_size(root, segment)
                path = (root / segment.file).resolve()
                sealed[segment.table].append(path)
                if num_rows < segment.num_rows:
                    cut[path] = num_rows
                if lengths is None and segment.num_final:
                    final[path] = segment.num_final == segment.num_rows
            else:
                hot[segment.table].append(files.whole(segment).slice(0, num_rows))
        except StoreError as error:
            damaged.append(str(error))
        except SegmentVanishedError:
            damaged.append(str(segment.damaged("the file is gone")))
    whole = {name: pa.concat_tables(parts) for name, parts in hot.items()}
    ends = {segment.table: segment.first_row + number for segment, number in counted.items()}
    return Snapshot(root, list(counted), sealed, whole, damaged, cut, ends, final)


def _num_counted(segment: Segment, lengths: Mapping[str, int] | None) -> int:
    """How many of its rows belong to a moment at which the tables had these lengths."""
    if lengths is None:
        return segment.num_rows
    return min(segment.num_rows, lengths.get(segment.table, 0) - segment.first_row)


def _lengths(ledger: sqlite3.Connection, step: int) -> dict[str, int]:
    """The number of rows of each table when the batch of `step` was formed."""
    found = ledger.execute(
        "SELECT s.num_rows FROM batches b JOIN snapshots s USING (sequence) WHERE b.step = ?", (step,)
    ).fetchone()
    if found is None:
        first, last = ledger.execute("SELECT min(step), max(step) FROM batches").fetchone()
        there = "none was formed yet" if last is None else f"there are those of steps {first} to {last}"
        raise StoreError(f"no batch of step {step}; {there}")
    lengths = {str(name): int(length) for name, length in json.loads(found[0]).items()}
    return lengths | dict.fromkeys(STEP_COLUMNS, 2**62)  # cut by their steps when they are shown


def _unchanged(ledger: sqlite3.Connection, segments: list[Segment]) -> bool:
    """Whether the ledger still names these files; if not, one may merely have been sealed."""
    return {segment.file for segment in all_segments(ledger)} == {segment.file for segment in segments}


def _empty(name: str) -> pa.Table:
    return STORED[name].empty_table().replace_schema_metadata(None)
