"""A run that begins as another one was: a job folder of its own, beside the first.

Sealed files and checkpoints are shared by hard links. What was not sealed then, and the one file of
a table of which only some rows are taken, is written anew, because a growing file must have one owner.
Nothing of the first run is written or locked, and both go their own ways afterwards.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trinity_data.atomic import new_folder
from trinity_data.errors import StoreError
from trinity_data.progress import (
    EXPLORED,
    LATE,
    STAGE_DONE,
    TASKS,
    TasksProgress,
    explored_key,
    late_key,
    tasks_key,
)
from trinity_data.schema import STORED, values_of
from trinity_data.store.ledger import naming_errors, open_for_writing, transaction
from trinity_data.store.parquet import write_sealed
from trinity_data.store.retention import ExpiredRows, all_expired, record_expired
from trinity_data.store.segment_reader import SegmentFiles, retry_if_moved
from trinity_data.store.segments import (
    SEALED,
    SEGMENTS_FOLDER,
    Segment,
    check_checkpoint,
    check_size,
)
from trinity_data.store.snapshot import (
    Snapshot,
    StoreVersion,
    job_folder,
    run_name,
    snapshot_with,
    store_folder,
)
from trinity_data.store.sql import SqlSession
from trinity_data.store.types import State
from trinity_data.store.writer import record_segments

# SQLite has no NaN
_STATES = (
    "SELECT e.experience_id, e.state, (o.experience_id IS NOT NULL)::INTEGER AS settled, "
    "if(isnan(o.advantage), NULL, o.advantage) AS advantage, if(isnan(o.reward), NULL, o.reward) AS reward "
    "FROM experiences e LEFT JOIN outcomes o USING (experience_id)"
)
_EXPLORED_STEPS = (
    "SELECT stage, greatest(max(step) - 1, coalesce((SELECT max(o.step) FROM operators o WHERE "
    "o.stage = groups.stage AND pipeline = 'experience'), 0)) AS step FROM groups GROUP BY stage"
)
# those that had no outcome of some rollout then
_UNFINISHED_GROUPS = (
    "SELECT stage, group_id, step FROM groups g LEFT JOIN (SELECT group_id, count(DISTINCT rollout) AS done, "
    "count(*) FILTER (state = 'raw') AS raw FROM experiences GROUP BY group_id) e USING (group_id) "
    "WHERE coalesce(done, 0) < repeat_times OR raw > 0 ORDER BY group_id"
)
_NUM_TASKS = "SELECT stage, taskset, count(*) AS rows FROM tasks WHERE parent IS NULL GROUP BY ALL"
_BATCH_ROWS = "SELECT step, position, experience_id FROM state_changes WHERE state IN ('trained', 'replayed')"


@dataclass(frozen=True)
class Shared:
    """What a branch took over."""

    num_rows: int
    linked_bytes: int
    written_bytes: int
    checkpoints: dict[int, str]
    """Folders by step, relative to the job's; they are named in the ledger and not taken over yet."""


@dataclass(frozen=True)
class _Source:
    """What the ledger that is branched off says."""

    experiences: list[tuple[Any, ...]]
    batches: list[tuple[int, str, int]]
    checkpoints: list[tuple[int, str, str, int]]
    snapshots: list[tuple[int, str]]
    progress: dict[str, Any]
    expired: list[ExpiredRows]

    @classmethod
    def read(cls, ledger: sqlite3.Connection, job: Path, version: StoreVersion) -> _Source:
        """What belongs to a version."""
        end = version.num_rows.get("experiences", 0)
        through = 2**62 if version.step is None else version.step
        checkpoints = "SELECT step, stage, path, sequence FROM checkpoints WHERE step <= ? ORDER BY step"
        expired = [lost for lost in all_expired(ledger) if lost.first_row < end]

        def rows(sql: str, *values: int) -> list[tuple[Any, ...]]:
            return ledger.execute(sql, values).fetchall()

        return cls(
            rows(
                "SELECT row, experience_id, stage, step, position, rollout, turn FROM experiences "
                "WHERE row < ? ORDER BY row",
                end,
            ),
            rows("SELECT step, stage, sequence FROM batches WHERE sequence <= ?", version.sequence),
            [row for row in rows(checkpoints, through) if (job / check_checkpoint(row[2])).is_dir()],
            rows("SELECT sequence, num_rows FROM snapshots WHERE sequence <= ?", version.sequence),
            {key: json.loads(value) for key, value in rows("SELECT key, value FROM progress")},
            [replace(lost, num_rows=min(lost.num_rows, end - lost.first_row)) for lost in expired],
        )

    def refuse_lost(self, indexed: Sequence[tuple[Any, ...]], trained_steps: Mapping[int, int]) -> None:
        """A branch goes on: what waits, and what it would train again after its checkpoint,
        must have its contents.
        """
        newest = max((step for step, *_ in self.checkpoints), default=0)
        lost = [
            name
            for row, name, *_, state, _, _, _ in indexed
            if any(r.first_row <= row < r.end_row for r in self.expired)
            and (state in (State.RAW, State.PENDING) or trained_steps.get(row, 0) > newest)
        ]
        if lost:
            raise StoreError(
                f"a branch from there would need the contents of {len(lost)} experiences that `trinity-data "
                f"retain` has removed since, such as {lost[0]!r}; branch off a later step"
            )

    def progress_at(self, version: StoreVersion, session: SqlSession) -> Iterator[tuple[str, Any]]:
        """What the run had done by then.

        The ledger keeps only the newest values, so they are counted from the rows.
        """
        explored = {row["stage"]: row["step"] for row in session.query(_EXPLORED_STEPS).to_pylist()}
        num_tasks = {
            tasks_key(row["stage"], row["taskset"]): row["rows"]
            for row in session.query(_NUM_TASKS).to_pylist()
        }
        for key, value in self.progress.items():
            kind, _, name = key.partition("/")
            if version.step is None:
                yield key, value
            elif kind == LATE:
                pass  # they were others then
            elif kind == EXPLORED:
                yield key, min(value, explored.get(name, version.step))
            elif kind == TASKS and key in num_tasks:
                then = TasksProgress(num_tasks[key]).dump()
                yield key, value if value["rows_read"] == num_tasks[key] else then
            elif kind in ("replay", "token_advantages") or (
                kind == STAGE_DONE and value is not None and value <= version.step
            ):
                yield key, value
        if version.step is not None:
            yield from self.late_groups(session, explored)

    def late_groups(
        self, session: SqlSession, explored: Mapping[str, int]
    ) -> Iterator[tuple[str, list[str]]]:
        """Groups of explored steps that go on, as `progress` has them."""
        late = defaultdict[str, list[str]](list)
        for row in session.query(_UNFINISHED_GROUPS).to_pylist():
            stage, group = row["stage"], row["group_id"]
            if row["step"] <= min(explored[stage], self.progress.get(explored_key(stage), 0)):
                late[late_key(stage, group.partition("/")[0])].append(group)
        yield from late.items()

    def ledger_rows(self, snapshot: Snapshot) -> dict[str, list[tuple[Any, ...]]]:
        """The rows of the branch's own ledger by table. Raises StoreError as `refuse_lost` does."""
        with SqlSession({"run": snapshot}, None, "8GB", None) as session:
            names, *columns = (values_of(column) for column in session.query(_STATES).columns)
            batch_rows = session.query(_BATCH_ROWS).to_pylist()
            progress = dict(self.progress_at(snapshot.version, session))
        states = dict(zip(names, zip(*columns, strict=True), strict=True))
        indexed = [(*row, *states[row[1]]) for row in self.experiences]
        numbers = {name: row for row, name, *_ in self.experiences}
        self.refuse_lost(indexed, {numbers[row["experience_id"]]: row["step"] for row in batch_rows})
        sizes = Counter(row["step"] for row in batch_rows)
        tallies = Counter((stage, step, state) for _, _, stage, step, _, _, _, state, *_ in indexed)
        return {
            "experiences": indexed,
            "tallies": [(*key, count) for key, count in tallies.items()],
            "batches": [(step, stage, sizes[step], at) for step, stage, at in self.batches],
            "batch_rows": [
                (row["step"], row["position"], numbers[row["experience_id"]]) for row in batch_rows
            ],
            "progress": [(key, json.dumps(value)) for key, value in progress.items()],
            "checkpoints": [(*row, min(at, snapshot.version.sequence)) for *row, at in self.checkpoints],
            "snapshots": self.snapshots,
        }


def branch_store(root: Path, target: Path, version: StoreVersion) -> Shared:
    """Makes the store `target`, which must not exist, as `root` was at `version`.

    It appears whole or not at all.
    """
    if target.exists():
        raise StoreError(f"{target} exists already; choose another name")

    def attempt() -> Shared:
        snapshot, source = snapshot_with(
            root, lambda ledger: _Source.read(ledger, root.parent, version), version
        )
        snapshot.refuse_damage()
        with new_folder(target) as partial:
            (partial / SEGMENTS_FOLDER).mkdir()
            segments, linked, written = _take_files(snapshot, partial)
            _write_ledger(partial, segments, source, snapshot)
        checkpoints = {step: path for step, _, path, _ in source.checkpoints}
        return Shared(version.num_rows.get("experiences", 0), linked, written, checkpoints)

    return retry_if_moved(attempt)


def link_tree(source: Path, target: Path) -> int:
    """The files of a finished folder under a second name; returns their bytes.

    For files that are never written again.

    Raises StoreError for links, which would share what lies elsewhere.
    """
    total = 0
    paths = sorted(source.rglob("*"))
    if link := next((path for path in (source, *paths) if path.is_symlink()), None):
        raise StoreError(
            f"{link} is a link; a branch shares only files of its run: put the files themselves there"
        )
    for path in (path for path in paths if path.is_file()):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        _link(path, copy)
        total += path.stat().st_size
    return total


def _take_files(snapshot: Snapshot, target: Path) -> tuple[list[Segment], int, int]:
    """Links or writes every file; returns the segments, and how many bytes were linked and written."""
    segments: list[Segment] = []
    files = SegmentFiles(snapshot.root)
    linked = written = 0
    for number, segment in enumerate(snapshot.segments, start=1):
        num_rows = snapshot.version.num_rows_of(segment)
        file = f"{SEGMENTS_FOLDER}/{segment.table}/{number:08d}"
        (target / file).parent.mkdir(exist_ok=True)
        if segment.kind == SEALED and num_rows == segment.num_rows:
            taken = replace(segment, number=number, file=f"{file}.0.parquet", num_final=0)
            with files.opening(segment):
                check_size(snapshot.root, segment)
                _link(snapshot.root / segment.file, target / taken.file)
            linked += taken.num_bytes
        else:
            rows = files.whole(segment).slice(0, num_rows).cast(STORED[segment.table])
            unsealed = replace(segment, number=number, file=f"{file}.arrows", num_rows=num_rows)
            taken = write_sealed(target, unsealed, [rows], rows.schema, epoch=0)
            written += taken.num_bytes
        segments.append(taken)
    return segments, linked, written


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        raise StoreError(
            f"cannot link {source}: {error.strerror}; a branch shares files with its run, "
            "so both must lie on one disk"
        ) from error


def _write_ledger(target: Path, segments: Sequence[Segment], source: _Source, snapshot: Snapshot) -> None:
    rows = source.ledger_rows(snapshot)
    with closing(open_for_writing(target)) as ledger, naming_errors(target), transaction(ledger):
        ledger.execute("UPDATE writer SET sequence = ?", (snapshot.version.sequence,))
        record_segments(ledger, segments)
        for table, values in rows.items():
            if values:
                places = ", ".join("?" for _ in values[0])
                ledger.executemany(f"INSERT INTO {table} VALUES ({places})", values)
        record_expired(ledger, source.expired)


ORIGIN_FILE = "branch.json"
# a model and a task set that the run had made for itself
MADE_INPUTS = "synthetic"
_FOLDER_NAME = re.compile(r"[\w][\w.+=@ -]*")


@dataclass(frozen=True)
class Branch:
    """What was made, and what it cost."""

    folder: Path
    num_experiences: int
    checkpoints: tuple[int, ...]
    linked_bytes: int
    """Shared with the run it was taken from."""
    written_bytes: int


def branch_run(run: Path, name: str, version: StoreVersion) -> Branch:
    """Makes the job folder `name` beside `run`; whole or not at all."""
    root = store_folder(run)
    if not _FOLDER_NAME.fullmatch(name):
        raise StoreError(
            f"found {name!r}; a branch is a folder beside its run: letters, digits, '_', '-', '.'"
        )
    job = job_folder(root)
    target = job.parent / name
    if target.exists():
        raise StoreError(f"{target} exists already; choose another name")
    with new_folder(target) as partial:
        shared = branch_store(root, partial / "store", version)
        taken = [MADE_INPUTS, *shared.checkpoints.values()]
        linked = sum(link_tree(job / path, partial / path) for path in taken)
        origin = {"run": run_name(root), "version": asdict(version)}
        (partial / ORIGIN_FILE).write_text(json.dumps(origin, indent=1, sort_keys=True))
    return Branch(
        target, shared.num_rows, tuple(shared.checkpoints), shared.linked_bytes + linked, shared.written_bytes
    )
