"""Versions of a store: what SQL, exports, branches and the audit look at.

Rows are only ever added, so a version is the length of every table; what a row's state was follows from the
rows. A snapshot holds the rows of one version as files and tables. It stays readable while the writer goes
on: Parquet files do not change, and mapped tails outlive their removal.
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
from trinity_data.schema import STORED, values_of
from trinity_data.store.ledger import (
    LEDGER_FILE,
    is_in_use,
    naming_errors,
    open_ended,
    open_for_reading,
    transaction,
)
from trinity_data.store.segment_reader import SegmentFiles, SegmentVanishedError, retry_if_moved
from trinity_data.store.segments import SEALED, Segment, all_segments, check_content, check_size

# rows that say how a step ended come after its batch was formed, and are known by the step they name
_STEP_COLUMNS = {"batches": "step", "steps": "step", "evals": "step", "model_versions": "version"}

_ATTEMPTS = 10
_T = TypeVar("_T")


@dataclass(frozen=True)
class StoreVersion:
    """How long every table was after commit `sequence`."""

    sequence: int
    num_rows: Mapping[str, int]
    """A table that is not named was empty."""
    step: int | None = None
    """The version is the end of this step; None for one that is no step's."""

    def num_rows_of(self, segment: Segment) -> int:
        """How many rows of a segment belong to the version; none, or fewer, of a later segment."""
        return min(segment.num_rows, self.num_rows.get(segment.table, 0) - segment.first_row)


@dataclass(frozen=True)
class Snapshot:
    """The rows of every table: sealed ones as Parquet files, the others in memory maps."""

    root: Path
    version: StoreVersion
    segments: list[Segment]
    sealed: dict[str, list[Path]]
    hot: dict[str, pa.Table]
    damaged: list[str]
    """What was set aside, in words. Damage inside a Parquet file shows when it is read, or by `verified`."""
    cut: dict[Path, int] = field(default_factory=dict)
    """Sealed files of which only so many rows belong to the version."""
    final: Mapping[Path, bool] = field(default_factory=dict)
    """Sealed files that say what finally became of their rows, and whether of all;
    of an earlier version none says it.
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

    def refuse_damage(self) -> None:
        """Raises StoreError where rows of the version are damaged or gone."""
        if self.damaged:
            raise StoreError(f"a damaged store has no past versions: {'; '.join(self.damaged)}")

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
        newer = take_snapshot(self.root, self.version)
        return None if newer.sealed == self.sealed else newer


def store_folder(run: Path) -> Path:
    """The store of a job folder; the store's own folder will do as well."""
    for folder in (run / "store", run):
        if (folder / LEDGER_FILE).exists():
            return folder
    raise StoreError(f"{run} holds no run: there is no store/{LEDGER_FILE} in it")


def job_folder(root: Path) -> Path:
    """Whose store this is; a store that lies alone is its own."""
    return root.parent if root.name == "store" else root


def run_name(root: Path) -> str:
    """`project/name` of the run of a store, wherever it lies on this machine."""
    job = job_folder(root.resolve())
    return f"{job.parent.name}/{job.name}"


def take_snapshot(
    root: Path, version: StoreVersion | None = None, *, files: SegmentFiles | None = None
) -> Snapshot:
    """What the ledger of the store in `root` knows now, or the rows of an earlier version.

    `files` are those of a reader of this store, which has mapped its tails already.
    """
    return snapshot_with(root, lambda ledger: None, version, files)[0]


def snapshot_with(
    root: Path,
    read: Callable[[sqlite3.Connection], _T],
    version: StoreVersion | None = None,
    files: SegmentFiles | None = None,
) -> tuple[Snapshot, _T]:
    """A snapshot, and what `read` finds in the ledger at the same time.

    Raises StoreError when the store never reached the version.
    """
    for _ in range(_ATTEMPTS):
        ended = not is_in_use(root)
        with closing(open_ended(root) if ended else open_for_reading(root)) as ledger, naming_errors(root):
            with transaction(ledger, "DEFERRED"):
                segments = all_segments(ledger)
                sequence = _sequence(ledger)
                result = read(ledger)
            snapshot = _load(root, segments, sequence, version, files or SegmentFiles(root))
            if ended and is_in_use(root):
                continue  # a writer came in between, and what was read may be mixed
            if not snapshot.damaged or {s.file for s in all_segments(ledger)} == {s.file for s in segments}:
                break  # else a file that seems to be gone may merely have been sealed
    return snapshot, result


def _sequence(ledger: sqlite3.Connection) -> int:
    """The number of the last commit; 0 where a damaged ledger hides it, which leaves the rows open to SQL."""
    try:
        (sequence,) = ledger.execute("SELECT sequence FROM writer").fetchone() or (None,)
    except sqlite3.DatabaseError:
        sequence = None
    return sequence if isinstance(sequence, int) else 0


def _load(
    root: Path, segments: list[Segment], sequence: int, earlier: StoreVersion | None, files: SegmentFiles
) -> Snapshot:
    ends = {segment.table: segment.end_row for segment in segments if segment.end_row}
    latest = StoreVersion(sequence, dict(sorted(ends.items())))
    version = earlier or latest
    if sequence < version.sequence:
        raise StoreError(f"{root} is at commit {sequence}, which is before commit {version.sequence}")
    if missing := [name for name, end in version.num_rows.items() if end > ends.get(name, 0)]:
        name, num_rows = missing[0], ends.get(missing[0], 0)
        raise StoreError(
            f"{root} has {num_rows} rows of {name!r}; the version asked for had {version.num_rows[name]}"
        )
    segments = [segment for segment in segments if version.num_rows_of(segment) > 0]
    sealed: dict[str, list[Path]] = {name: [] for name in STORED}
    hot = {name: [schema.empty_table().replace_schema_metadata(None)] for name, schema in STORED.items()}
    cut, final, damaged = {}, {}, []
    for segment in segments:
        num_rows = version.num_rows_of(segment)
        try:
            if segment.kind == SEALED:
                check_size(root, segment)
                path = (root / segment.file).resolve()
                sealed[segment.table].append(path)
                if num_rows < segment.num_rows:
                    cut[path] = num_rows
                if earlier is None and segment.num_final:
                    final[path] = segment.num_final == segment.num_rows
            else:
                hot[segment.table].append(files.whole(segment).slice(0, num_rows))
        except StoreError as error:
            damaged.append(str(error))
        except SegmentVanishedError:
            damaged.append(str(segment.damaged("the file is gone")))
    tables = {name: pa.concat_tables(parts) for name, parts in hot.items()}
    return Snapshot(root, version, segments, sealed, tables, damaged, cut, final)


def at_step(root: Path, step: int) -> StoreVersion:
    """The end of a step: all there was when its batch was formed,
    and what its training wrote down afterwards.
    """

    def find() -> StoreVersion:
        snapshot, recorded = snapshot_with(root, _recorded_batches)
        if step not in recorded:
            steps = f"there are those of steps {min(recorded)} to {max(recorded)}" if recorded else ""
            raise StoreError(f"no batch of step {step}; {steps or 'none was formed yet'}")
        sequence, num_rows = recorded[step]
        lengths = num_rows | _ends_of_steps(snapshot, step, num_rows)
        return StoreVersion(sequence, {name: rows for name, rows in sorted(lengths.items()) if rows}, step)

    return retry_if_moved(find)


def before_operators(root: Path, first_step: int, last_step: int) -> StoreVersion:
    """The end of the step before `first_step`, and with it the rollouts up to `last_step`
    as if no operator had processed them.
    """

    def find() -> StoreVersion:
        snapshot, recorded = snapshot_with(root, _recorded_batches)
        earlier = max((step for step in recorded if step < first_step), default=None)
        sequence, num_rows = (0, dict[str, int]()) if earlier is None else recorded[earlier]
        processed = {
            name: _rows_through(snapshot, name, "step", first_step - 1)
            for name in ("outcomes", "decisions", "operators", "contracts")
        }
        raw = {name: _rows_through(snapshot, name, "step", last_step) for name in ("groups", "experiences")}
        lengths = num_rows | _ends_of_steps(snapshot, first_step - 1, num_rows) | processed | raw
        lengths["tasks"] = snapshot.version.num_rows.get("tasks", 0)
        lengths = {name: rows for name, rows in sorted(lengths.items()) if rows}
        return StoreVersion(sequence, lengths, first_step - 1)

    return retry_if_moved(find)


def parse_version(data: object, where: Path) -> StoreVersion:
    """A version as it was written down; refuses anything else."""
    if isinstance(data, dict) and isinstance(data.get("num_rows"), dict):
        num_rows, step = data["num_rows"], data.get("step")
        numbers = [data.get("sequence"), *num_rows.values(), *([] if step is None else [step])]
        if all(isinstance(number, int) for number in numbers) and num_rows.keys() <= STORED.keys():
            return StoreVersion(data["sequence"], num_rows, step)
    raise StoreError(f"{where} does not name a version of a store: sequence, num_rows by table, step")


def _recorded_batches(ledger: sqlite3.Connection) -> dict[int, tuple[int, dict[str, int]]]:
    """The commit in which the batch of each step was formed, and the lengths of the tables then."""
    batches = ledger.execute(
        "SELECT b.step, b.sequence, s.num_rows FROM batches b JOIN snapshots s USING (sequence)"
    )
    return {step: (sequence, json.loads(num_rows)) for step, sequence, num_rows in batches.fetchall()}


def _ends_of_steps(snapshot: Snapshot, step: int, num_rows: Mapping[str, int]) -> dict[str, int]:
    """How long the tables that say how a step ended were when `step` had; `num_rows`: at its batch."""
    return {
        name: _rows_through(snapshot, name, column, step, num_rows.get(name, 0))
        for name, column in _STEP_COLUMNS.items()
    }


def _rows_through(snapshot: Snapshot, table: str, column: str, step: int, at_least: int = 0) -> int:
    """How many rows from the start are about no later step; and no fewer than `at_least`.

    Raises StoreError where a damaged file hides it.
    """
    files = SegmentFiles(snapshot.root)
    for segment in snapshot.segments:
        if segment.table == table and segment.end_row > at_least:
            values = values_of(files.whole(segment, [column])[column])
            for number, value in enumerate(values, segment.first_row):
                if number >= at_least and value is not None and value > step:
                    return number
    return snapshot.version.num_rows.get(table, 0)
