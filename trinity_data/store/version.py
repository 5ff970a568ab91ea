"""Past moments of a store, and names for them.

Rows are only ever added, so a moment is the length of every table;
what a row's state was follows from the rows.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pyarrow as pa

from trinity_data.atomic import fsync_path
from trinity_data.errors import StoreError, did_you_mean
from trinity_data.store.segment_reader import SegmentFiles, retry_if_moved
from trinity_data.store.segments import SEALED, Segment
from trinity_data.store.snapshot import STEP_COLUMNS, Snapshot, snapshot_with
from trinity_data.store.tables import STORED

TAGS_FOLDER = "tags"
_NAME = re.compile(r"[A-Za-z_][\w.+=-]*")


@dataclass(frozen=True)
class StoreVersion:
    """How long every table was after commit `sequence`."""

    sequence: int
    num_rows: Mapping[str, int]
    """A table that is not named was empty."""
    step: int | None = None
    """The moment is the end of this step; None for one that is no step's."""


def latest(root: Path) -> tuple[Snapshot, StoreVersion]:
    """All there is now."""
    snapshot, sequence = snapshot_with(root, _sequence)
    ends = {segment.table: segment.end_row for segment in snapshot.segments}
    return snapshot, StoreVersion(sequence, {name: end for name, end in sorted(ends.items()) if end})


def snapshot_at(root: Path, moment: StoreVersion) -> Snapshot:
    """The rows as they were. Refused when some of them are damaged or gone."""

    def attempt() -> Snapshot:
        snapshot, sequence = snapshot_with(root, _sequence)
        if sequence < moment.sequence:
            raise StoreError(f"{root} is at commit {sequence}, which is before commit {moment.sequence}")
        return truncate_to(snapshot, moment)

    return retry_if_moved(attempt)


def truncate_to(snapshot: Snapshot, moment: StoreVersion) -> Snapshot:
    """The part of a snapshot that was there at an earlier moment.

    What of a file counts only in part is loaded.
    """
    _refuse_damage(snapshot)
    sealed: dict[str, list[Path]] = {name: [] for name in STORED}
    hot = {name: STORED[name].empty_table().replace_schema_metadata(None) for name in STORED}
    for name in STORED:
        for segment, rows, num_rows in parts(snapshot, name, moment.num_rows.get(name, 0)):
            if rows is None:
                sealed[name].append((snapshot.root / segment.file).resolve())
            else:
                hot[name] = pa.concat_tables([hot[name], rows.slice(0, num_rows)])
    kept = [s for s in snapshot.segments if s.first_row < moment.num_rows.get(s.table, 0)]
    lengths = {name: moment.num_rows.get(name, 0) for name in STORED}
    return replace(snapshot, segments=kept, sealed=sealed, hot=hot, lengths=lengths, final={})


def parts(snapshot: Snapshot, table: str, end_row: int) -> Iterator[tuple[Segment, pa.Table | None, int]]:
    """The segments that hold rows before `end_row` and how many of them.

    No rows for a sealed file that counts whole.
    """
    in_memory, found = 0, 0
    for segment in snapshot.segments:
        if segment.table != table:
            continue
        num_rows = min(end_row - segment.first_row, segment.num_rows)
        rows = None
        if segment.kind != SEALED:
            rows = snapshot.hot[table].slice(in_memory, segment.num_rows)
            in_memory += segment.num_rows
        if num_rows <= 0:
            continue
        if rows is None and num_rows < segment.num_rows:
            rows = SegmentFiles(snapshot.root).whole(segment)
        found = segment.first_row + num_rows
        yield segment, rows, num_rows
    if found < end_row:
        raise StoreError(f"{snapshot.root} has {found} rows of {table!r}; the moment asked for had {end_row}")


def at_step(root: Path, step: int) -> StoreVersion:
    """The end of a step: all there was when its batch was formed,
    and what its training wrote down afterwards.
    """
    return retry_if_moved(lambda: _at_step(root, step))


def _at_step(root: Path, step: int) -> StoreVersion:
    snapshot, recorded = snapshot_with(root, _recorded_batches)
    if step not in recorded:
        known = f"{min(recorded)} to {max(recorded)}" if recorded else "none, nothing was trained yet"
        raise StoreError(f"step {step} of {root} has no batch; steps with one: {known}")
    sequence, num_rows = recorded[step]
    _refuse_damage(snapshot)
    later = {
        name: _rows_through(snapshot, name, column, step, num_rows.get(name, 0))
        for name, column in STEP_COLUMNS.items()
    }
    lengths = {name: rows for name, rows in sorted((num_rows | later).items()) if rows}
    return StoreVersion(sequence, lengths, step)


def before_operators(root: Path, first_step: int, last_step: int) -> StoreVersion:
    """The end of the step before `first_step`, and with it the rollouts up to `last_step`
    as if nobody had judged them.
    """
    return retry_if_moved(lambda: _before_judging(root, first_step, last_step))


def _before_judging(root: Path, first_step: int, last_step: int) -> StoreVersion:
    snapshot, recorded = snapshot_with(root, _recorded_batches)
    _refuse_damage(snapshot)
    earlier = max((step for step in recorded if step < first_step), default=None)
    sequence, known = (0, dict[str, int]()) if earlier is None else recorded[earlier]
    later = {
        name: _rows_through(snapshot, name, column, first_step - 1, known.get(name, 0))
        for name, column in STEP_COLUMNS.items()
    }
    judged = {
        name: _rows_through(snapshot, name, "step", first_step - 1)
        for name in ("outcomes", "decisions", "operators")
    }
    raw = {name: _rows_through(snapshot, name, "step", last_step) for name in ("groups", "experiences")}
    lengths = known | later | judged | raw | {"tasks": _end(snapshot, "tasks")}
    return StoreVersion(
        sequence, {name: rows for name, rows in sorted(lengths.items()) if rows}, first_step - 1
    )


def named_version(root: Path, name: str) -> StoreVersion:
    """The end of the step, or the tag, that a person names."""
    if name.isdigit():
        return at_step(root, int(name))
    known = tags(root)
    if name not in known:
        raise StoreError(
            f"{root} has no step or tag {name!r}; tags: "
            f"{', '.join(known) or 'none'}{did_you_mean(name, known)}"
        )
    return known[name]


def tag(root: Path, name: str, moment: StoreVersion) -> None:
    """Gives a moment a name, for good. May be done while a run writes."""
    if not _NAME.fullmatch(name):
        raise StoreError(
            f"a tag begins with a letter and has letters, digits, '_', '-', '.' only; found {name!r}"
        )
    folder = root / TAGS_FOLDER
    if folder.is_symlink():
        raise StoreError(f"{folder} is a link; a store does not write elsewhere")
    folder.mkdir(exist_ok=True)
    partial = folder / f".{name}.{os.getpid()}"
    with partial.open("w") as file:
        file.write(json.dumps(asdict(moment), indent=1, sort_keys=True))
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(partial, folder / f"{name}.json")
    except FileExistsError:
        raise StoreError(f"{root} has a tag {name!r} already; choose another name") from None
    finally:
        partial.unlink()
    fsync_path(folder)
    fsync_path(root)


def tags(root: Path) -> dict[str, StoreVersion]:
    """Tags by name."""
    files = sorted((root / TAGS_FOLDER).glob("[!.]*.json"))
    return {file.stem: parse_version(json.loads(file.read_text()), file) for file in files}


def parse_version(data: object, where: Path) -> StoreVersion:
    """A moment as it was written down; refuses anything else."""
    if isinstance(data, dict) and isinstance(data.get("num_rows"), dict):
        num_rows, step = data["num_rows"], data.get("step")
        numbers = [data.get("sequence"), *num_rows.values(), *([] if step is None else [step])]
        if all(isinstance(number, int) for number in numbers) and num_rows.keys() <= STORED.keys():
            return StoreVersion(data["sequence"], num_rows, step)
    raise StoreError(f"{where} does not name a position of a store: sequence, num_rows by table, step")


def _sequence(ledger: sqlite3.Connection) -> int:
    return int(ledger.execute("SELECT sequence FROM writer").fetchone()[0])


def _recorded_batches(ledger: sqlite3.Connection) -> dict[int, tuple[int, dict[str, int]]]:
    """The commit in which the batch of each step was formed, and the lengths of the tables then."""
    found = ledger.execute(
        "SELECT b.step, b.sequence, s.num_rows FROM batches b JOIN snapshots s USING (sequence)"
    )
    return {step: (sequence, json.loads(num_rows)) for step, sequence, num_rows in found.fetchall()}


def _rows_through(snapshot: Snapshot, table: str, column: str, step: int, known: int = 0) -> int:
    """How many rows from the start are about no later step; at least the `known` ones."""
    end = _end(snapshot, table)
    files = SegmentFiles(snapshot.root)
    for segment, rows, _ in parts(snapshot, table, end):
        values = (files.whole(segment, [column]) if rows is None else rows)[column].to_pylist()
        for number, value in enumerate(values, segment.first_row):
            if number >= known and value is not None and value > step:
                return number
    return end


def _end(snapshot: Snapshot, table: str) -> int:
    return max((segment.end_row for segment in snapshot.segments if segment.table == table), default=0)


def _refuse_damage(snapshot: Snapshot) -> None:
    if snapshot.damaged:
        raise StoreError(f"a damaged store has no past moments: {'; '.join(snapshot.damaged)}")
