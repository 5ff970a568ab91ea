"""Does the ledger say what the rows say?

Everything that was generated must be explained, with nothing left over. States are derived a second time,
from the rows alone, and every file is read and compared with its checksum.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.processes import relaxed_gc
from trinity_data.schema import values_of
from trinity_data.store.ledger import damage
from trinity_data.store.reader import PendingRollouts
from trinity_data.store.retention import ExpiredRows, all_expired
from trinity_data.store.segments import Segment
from trinity_data.store.snapshot import snapshot_with, store_folder
from trinity_data.store.sql import SqlSession
from trinity_data.store.types import State
from trinity_data.store.views import QUARANTINED, finished_rows

_LEDGER: dict[str, tuple[str, list[pa.DataType]]] = {
    "ledger_experiences": (
        (
            "SELECT row, experience_id, stage, step, state, advantage, "
            "shaped_reward FROM experiences ORDER BY row"
        ),
        [pa.int64(), pa.string(), pa.string(), pa.int64(), pa.string(), pa.float64(), pa.float64()],
    ),
    "ledger_tallies": (
        "SELECT stage, step, state, num_rows FROM tallies",
        [pa.string(), pa.int64(), pa.string(), pa.int64()],
    ),
    "ledger_batches": (
        "SELECT step, stage, num_rows FROM batches",
        [pa.int64(), pa.string(), pa.int64()],
    ),
    "ledger_batch_rows": (
        "SELECT step, position, row FROM batch_rows",
        [pa.int64(), pa.int64(), pa.int64()],
    ),
    "ledger_replays": (
        "SELECT substr(key, 8) AS stage FROM progress WHERE key LIKE 'replay/%'",
        [pa.string()],
    ),
    "ledger_ended": (
        (
            "SELECT substr(key, 12) AS stage, "
            "CAST(value AS INTEGER) AS step FROM progress WHERE key LIKE 'stage_done/%'"
        ),
        [pa.string(), pa.int64()],
    ),
    "ledger_streams": (
        "SELECT key, json_extract(value, '$.rows_read') AS num_rows FROM progress "
        "WHERE key LIKE 'tasks/%' AND json_type(value, '$.rows_read') = 'integer'",
        [pa.string(), pa.int64()],
    ),
}

# what is wrong, and the query that lists where; nothing listed is as it should be
_CHECKS = {
    "an experience is stored twice": (
        "SELECT experience_id FROM rollouts GROUP BY experience_id HAVING count(*) > 1"
    ),
    "an experience is in the rows but not in the ledger": (
        "SELECT experience_id FROM rollouts ANTI JOIN ledger_experiences USING (experience_id)"
    ),
    "an experience is in the ledger but not in the rows": (
        "SELECT experience_id FROM ledger_experiences ANTI JOIN rollouts USING (experience_id)"
    ),
    "the ledger gives an experience another state than its rows": (
        "SELECT e.experience_id || ' is ' || l.state || ' in the ledger and ' || e.state || ' by its rows' "
        "FROM ledger_experiences l JOIN experiences e USING (experience_id) WHERE l.state <> e.state"
    ),
    "the ledger gives an experience another stage or step than its row": (
        "SELECT experience_id FROM ledger_experiences l JOIN rollouts r USING (experience_id) "
        "WHERE l.stage <> r.stage OR l.step <> r.step"
    ),
    "the ledger gives an experience another advantage or reward than its outcome": (
        "SELECT experience_id FROM ledger_experiences l JOIN outcomes o USING (experience_id) "
        "WHERE l.advantage IS DISTINCT FROM if(isnan(o.advantage), NULL, o.advantage) "
        "OR l.shaped_reward IS DISTINCT FROM if(isnan(o.reward), NULL, o.reward)"  # SQLite has no NaN
    ),
    "the contents of an experience were expired before it was done with": (
        "SELECT experience_id || ' is ' || state FROM ledger_experiences l JOIN ledger_expired r "
        "ON l.row >= r.first_row AND l.row < r.end_row WHERE state IN ('raw', 'pending')"
    ),
    "an outcome has no experience": (
        "SELECT experience_id FROM outcomes ANTI JOIN rollouts USING (experience_id)"
    ),
    "an experience has two outcomes": (
        "SELECT experience_id FROM outcomes GROUP BY experience_id HAVING count(*) > 1"
    ),
    "the ledger's tally differs from its rows": (
        "SELECT stage || ' step ' || step || ' ' || state || ': tally ' || coalesce(t.num_rows, 0) || ', "
        "rows ' || coalesce(c.num_rows, "
        "0) FROM (SELECT * FROM ledger_tallies WHERE num_rows <> 0) t FULL JOIN (SELECT stage, step, state, "
        "count(*) AS num_rows FROM ledger_experiences GROUP BY ALL) c USING (stage, step, "
        "state) WHERE t.num_rows IS DISTINCT FROM c.num_rows"
    ),
    "an experience is in two batches": (
        "WITH once AS (FROM ledger_batch_rows ANTI JOIN "
        "(SELECT step FROM ledger_batches SEMI JOIN ledger_replays USING (stage)) r USING (step)) "
        "SELECT coalesce(experience_id, 'row ' || row) || ' in steps ' || string_agg(step, ', "
        "' ORDER BY step) FROM once SEMI JOIN (SELECT row FROM once GROUP BY row HAVING count(*) > 1) USING "
        "(row) GROUP BY experience_id, row"
    ),
    "a batch holds an experience twice": (
        "SELECT coalesce(experience_id, 'row ' || row) || ' in step ' || step "
        "FROM ledger_batch_rows GROUP BY experience_id, row, step HAVING count(*) > 1"
    ),
    "an experience is replayed before it is trained": (
        "SELECT m.experience_id || ' in step ' || m.step FROM state_changes m LEFT JOIN "
        "(SELECT experience_id, step FROM state_changes WHERE state = 'trained') t USING (experience_id) "
        "WHERE m.state = 'replayed' AND coalesce(t.step >= m.step, true)"
    ),
    "a batch names a row that is no experience": (
        "SELECT 'row ' || row || ' in step ' || step FROM ledger_batch_rows WHERE experience_id IS NULL"
    ),
    "a batch is not as long as it was when it was formed": (
        "SELECT 'step ' || step FROM ledger_batches b FULL JOIN "
        "(SELECT step, count(*) AS num_rows FROM ledger_batch_rows GROUP BY step) r USING (step) "
        "WHERE coalesce(b.num_rows, -1) <> coalesce(r.num_rows, 0)"
    ),
    "the ledger's batches differ from the state changes recorded with them": (
        "SELECT experience_id || ' in step ' || step FROM ledger_batch_rows b FULL JOIN "
        "(SELECT step, position, experience_id FROM state_changes WHERE state IN ('trained', 'replayed')) m "
        "USING (step, position, experience_id) WHERE b.step IS NULL OR m.step IS NULL"
    ),
    "a trained row belongs to no batch": (
        "SELECT b.experience_id || ' in step ' || b.step FROM batches b "
        "ANTI JOIN ledger_batch_rows l ON l.step = b.step AND l.experience_id = b.experience_id"
    ),
    "a row was trained twice in one step": (
        "SELECT experience_id || ' in step ' || step FROM batches GROUP BY experience_id, "
        "step HAVING count(*) > 1"
    ),
    "rows of a task set were skipped or read twice": (
        "SELECT 'stage ' || stage || ', ' || taskset || ': ' || count(*) || ' rows with ' "
        "|| count(DISTINCT position) || ' positions up to ' || max(position) FROM tasks WHERE position IS "
        "NOT NULL GROUP BY stage, "
        "taskset HAVING count(*) <> max(position) + 1 OR count(DISTINCT position) <> count(*)"
    ),
    "a task set was read to another row than its tasks say": (
        "SELECT key || ': row ' || num_rows || ', ' || coalesce(n, "
        "0) || ' tasks' FROM ledger_streams LEFT JOIN "
        "(SELECT 'tasks/' || stage || '/' || taskset AS key, "
        "count(*) AS n FROM tasks GROUP BY ALL) USING (key) WHERE num_rows <> coalesce(n, 0)"
    ),
    "a task that an operator had dropped was tried": (
        "SELECT task_id || ' in ' || group_id FROM groups SEMI JOIN "
        "(SELECT stage, task_id FROM tasks GROUP BY ALL HAVING NOT bool_or(kept)) USING (stage, task_id)"
    ),
}

# asked when some sealed file says what finally became of its rows
_FINISHED = {
    "a sealed file says something else of an experience than its outcome and state changes": (
        "SELECT experience_id || ' is ' || coalesce(final_state, 'unknown') || ' in its file and ' || state "
        "|| ' by its rows' FROM finished f JOIN experiences e USING (experience_id) WHERE final_state IS "
        "DISTINCT FROM state OR final_reward IS DISTINCT FROM e.reward OR final_advantage IS DISTINCT FROM "
        "advantage OR final_scores IS DISTINCT FROM scores OR final_kept IS DISTINCT FROM kept "
        "OR final_dropped_by IS DISTINCT FROM dropped_by OR final_trained_step IS DISTINCT FROM trained_step"
    ),
}

_GENERATED = "SELECT stage, step, count(*) AS generated FROM rollouts GROUP BY ALL"
_BY_STATE = "SELECT stage, step, state, count(*) AS number FROM ledger_experiences GROUP BY ALL"
_BY_OPERATOR = (
    "SELECT l.stage, l.step, coalesce(q.contract, nullif(dropped_by, ''), 'unnamed') AS operator, "
    "count(*) AS number FROM (FROM ledger_experiences WHERE state = 'dropped') l "
    f"LEFT JOIN outcomes USING (experience_id) LEFT JOIN ({QUARANTINED}) q USING (experience_id) "
    "GROUP BY ALL ORDER BY ALL"
)
# a task id may be read twice, by two stages or from a set that repeats itself;
# rows of a data set belong to no task
_BY_TASKSET = f"""
SELECT coalesce(t.taskset, 'training data ' || nullif(parse_filename(coalesce(
        r.origin ->> '$.source', r.origin ->> '$.origin.source', r.origin ->> '$.origin.run')), ''),
        'unknown')
    AS taskset, l.state, CASE WHEN l.state = 'dropped' THEN coalesce(q.contract, nullif(o.dropped_by, ''),
    'unnamed') END AS operator,
    count(*) AS number
FROM (SELECT *, CASE WHEN json_valid(info) THEN info::JSON END AS origin FROM rollouts) r
LEFT JOIN ledger_experiences l USING (experience_id) LEFT JOIN outcomes o USING (experience_id)
LEFT JOIN ({QUARANTINED}) q USING (experience_id)
LEFT JOIN (SELECT stage, task_id, min(taskset) AS taskset FROM tasks GROUP BY ALL) t
    ON t.stage = r.stage AND t.task_id = r.task_id
GROUP BY ALL ORDER BY ALL
"""
_TASKS = """
SELECT stage, taskset, count(*) AS read, count(*) FILTER (NOT kept) AS dropped,
    count(*) FILTER (kept AND g.task_id IS NOT NULL) AS tried, count(*) FILTER (kept
    AND g.task_id IS NULL) AS waiting
FROM tasks t LEFT JOIN (SELECT DISTINCT stage, task_id FROM groups) g USING (stage, task_id)
GROUP BY ALL ORDER BY ALL
"""
_WAITING = """
SELECT stage, count(DISTINCT rtrim(experience_id, '0123456789')) AS rollouts, count(*) AS rows,
    min(l.step) AS first_step,
    max(l.step) AS last_step, any_value(e.step) AS ended_at
FROM ledger_experiences l LEFT JOIN ledger_ended e USING (stage) WHERE state IN ('pending', 'raw')
GROUP BY stage ORDER BY first_step, stage
"""
# errors that differ in numbers alone are one
_FAILED = """
WITH by_rollout AS (
    SELECT stage, rtrim(experience_id, '0123456789') AS rollout, max(error) AS error, min(experience_id) AS id
    FROM rollouts GROUP BY ALL),
shapes AS (
    SELECT stage, count(*) AS times, min_by(split_part(error, chr(10), 1), id) AS error, min(id) AS id
    FROM by_rollout WHERE error <> ''
    GROUP BY stage, regexp_replace(split_part(error, chr(10), 1), '[0-9]+', '#', 'g'))
SELECT stage, failed, number, times, error, id FROM (
    SELECT stage, sum(times)::BIGINT AS failed, max(times) AS times, arg_max(error, times) AS error,
    arg_max(id, times) AS id
    FROM shapes GROUP BY stage)
JOIN (SELECT stage, count(*) AS number FROM by_rollout GROUP BY stage) USING (stage) ORDER BY stage
"""
_BROKEN = """
SELECT stage, contract, count(*) AS times, min(step) AS first, max(step) AS last,
    sum(len(dropped_ids))::BIGINT AS dropped, arg_min(message, step) AS message
FROM contracts WHERE NOT held GROUP BY stage, contract ORDER BY first, contract
"""
_UNTRAINED = """
SELECT stage, count(*) AS number, min(step) AS first, max(step) AS last,
    (SELECT count(*) FROM steps a WHERE a.stage = s.stage) AS steps
FROM steps s WHERE num_experiences IS NOT NULL AND loss IS NULL GROUP BY stage ORDER BY first
"""
_EXAMPLES = 3
_ERROR_CHARACTERS = 200
_FETCHED_ROWS = 20_000


@dataclass
class StateCounts:
    """What became of rows that were generated."""

    generated: int = 0
    states: dict[State, int] = field(default_factory=lambda: dict.fromkeys(State, 0))
    dropped_by: dict[str, int] = field(default_factory=dict)

    @property
    def unexplained(self) -> int:
        """Rows that exist without a state, or states without a row. Zero, always."""
        return self.generated - sum(self.states.values())


@dataclass
class AuditRow(StateCounts):
    """Counts of states of one step of one stage."""

    stage: str = ""
    step: int = 0


@dataclass(frozen=True)
class TasksetRow:
    """How far a stage has come with a task set: read = dropped + tried + waiting."""

    stage: str
    taskset: str
    read: int
    dropped: int
    tried: int
    waiting: int


@dataclass(frozen=True)
class AuditReport:
    """What was counted, by stage and step and by task set, and what is wrong."""

    rows: list[AuditRow]
    problems: list[str]
    tasksets: dict[str, StateCounts]
    """Of experiences, by the task set of their tasks."""
    tasks: list[TasksetRow]
    num_files: int
    num_bytes: int
    expired: list[ExpiredRows] = field(default_factory=list)
    """Rows that are counted and have lost their contents."""
    remarks: list[str] = field(default_factory=list)
    """What is no fault of the counts and worth knowing: what failed, what trained nothing, what waits."""

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def total(self) -> StateCounts:
        """All steps together."""
        total = StateCounts()
        for row in self.rows:
            total.generated += row.generated
            for state, number in row.states.items():
                total.states[state] += number
            for operator, number in row.dropped_by.items():
                total.dropped_by[operator] = total.dropped_by.get(operator, 0) + number
        return total


def audit(run: Path) -> AuditReport:
    """Checks a job folder, as of one version; it may be in use."""
    root = store_folder(run)
    with ThreadPoolExecutor(1) as pool:
        # beside the reading: both take seconds
        checking = pool.submit(lambda: snapshot_with(root, damage)[1])
        snapshot, (torn, ledger, expired) = snapshot_with(root, partial(_read_ledger, checking))
    verified = snapshot.verified()
    num_bytes = sum(segment.num_bytes for segment in snapshot.segments)
    if torn:  # then its rows cannot be compared with anything
        return AuditReport([], [*torn, *verified.damaged], {}, [], len(snapshot.segments), num_bytes)
    problems = [*verified.damaged, *_check_order(snapshot.segments)]
    checks = _CHECKS | _FINISHED if finished_rows(verified) else _CHECKS
    with SqlSession({root.name: verified}, None, "8GB", None, derived=True) as session:
        for name, table in ledger.items():
            session.register(name, table)
        rows = _account(session)
        problems += _faults(session, checks, rows)
        tasksets = _account_by_taskset(session)
        tasks = [TasksetRow(**row) for row in session.query(_TASKS).to_pylist()]
        remarks = list(_remarks(session, run))
    return AuditReport(rows, problems, tasksets, tasks, len(snapshot.segments), num_bytes, expired, remarks)


def _faults(session: SqlSession, checks: Mapping[str, str], rows: Sequence[AuditRow]) -> Iterator[str]:
    """What the checks list, with examples, and the steps whose counts do not add up."""
    for what, sql in checks.items():
        if (faults := session.query(sql)).num_rows:
            examples = [str(value) for value in values_of(faults.column(0).slice(0, _EXAMPLES))]
            more = faults.num_rows - len(examples)
            yield f"{what}: {'; '.join(examples)}" + (f", and {more} more" if more else "")
    for row in rows:
        if row.unexplained:
            counts = f"{row.generated} generated, {row.unexplained} unexplained"
            yield f"stage {row.stage!r}, step {row.step}: {counts}"


def _read_ledger(
    checking: Future[list[str]], ledger: sqlite3.Connection
) -> tuple[list[str], dict[str, pa.Table], list[ExpiredRows]]:
    """What is wrong with its file, or else its tables."""
    try:
        expired = all_expired(ledger)
        with relaxed_gc():
            tables = {name: _rows(ledger, sql, types) for name, (sql, types) in _LEDGER.items()}
    except sqlite3.DatabaseError:
        if torn := checking.result():
            return torn, {}, []
        raise
    batches, experiences = tables["ledger_batch_rows"], tables["ledger_experiences"]
    places = pc.index_in(batches["row"], value_set=experiences["row"])
    ids = experiences["experience_id"].take(places)
    tables["ledger_batch_rows"] = batches.append_column("experience_id", ids)
    ranges = [[lost.first_row for lost in expired], [lost.end_row for lost in expired]]
    tables["ledger_expired"] = pa.table([pa.array(r, pa.int64()) for r in ranges], ["first_row", "end_row"])
    return checking.result(), tables, expired


def _rows(ledger: sqlite3.Connection, sql: str, types: list[pa.DataType]) -> pa.Table:
    cursor = ledger.execute(sql)
    schema = pa.schema(list(zip((column[0] for column in cursor.description), types, strict=True)))
    batches = []
    while rows := cursor.fetchmany(_FETCHED_ROWS):
        columns = [
            pa.array(values, kind) for values, kind in zip(zip(*rows, strict=True), types, strict=True)
        ]
        batches.append(pa.RecordBatch.from_arrays(columns, schema=schema))
    return pa.Table.from_batches(batches, schema=schema)


def _check_order(segments: list[Segment]) -> Iterator[str]:
    """Rows of a table are numbered without gaps and without overlaps."""
    ends: dict[str, int] = {}
    for segment in segments:
        expected = ends.get(segment.table, 0)
        if segment.first_row != expected:
            yield f"segment {segment.file} begins at row {segment.first_row}, and not at {expected}"
        ends[segment.table] = segment.end_row


def _remarks(session: SqlSession, run: Path) -> Iterator[str]:
    for row in session.query(_FAILED).to_pylist():
        error = row["error"][:_ERROR_CHARACTERS]
        yield (
            f"stage {row['stage']}: {row['failed']:,} of {row['number']:,} rollouts failed; "
            f"commonest ({row['times']:,} times): {error}; `trinity-data why {run} {row['id']}` shows one"
        )
    for row in session.query(_BROKEN).to_pylist():
        yield (
            f"stage {row['stage']}: {row['message']} (step {row['first']}, the first of {row['times']:,}; "
            f"the last is step {row['last']}; {row['dropped']:,} rows were dropped)"
        )
    for row in session.query(_UNTRAINED).to_pylist():
        yield (
            f"stage {row['stage']}: {row['number']:,} of {row['steps']:,} steps had nothing to train, "
            f"the first of them step {row['first']}, the last step {row['last']}"
        )
    for row in session.query(_WAITING).to_pylist():
        yield str(PendingRollouts(**row))


def _account(session: SqlSession) -> list[AuditRow]:
    rows: dict[tuple[str, int], AuditRow] = {}

    def row_of(count: dict[str, object]) -> AuditRow:
        stage, step = str(count["stage"]), int(str(count["step"]))
        return rows.setdefault((stage, step), AuditRow(stage=stage, step=step))

    for count in session.query(_GENERATED).to_pylist():
        row_of(count).generated = count["generated"]
    for count in session.query(_BY_STATE).to_pylist():
        row_of(count).states[State(count["state"])] = count["number"]
    for count in session.query(_BY_OPERATOR).to_pylist():
        row_of(count).dropped_by[count["operator"]] = count["number"]
    return [rows[key] for key in sorted(rows)]


def _account_by_taskset(session: SqlSession) -> dict[str, StateCounts]:
    tasksets: dict[str, StateCounts] = {}
    for count in session.query(_BY_TASKSET).to_pylist():
        counts = tasksets.setdefault(count["taskset"], StateCounts())
        counts.generated += count["number"]
        if count["state"] is not None:
            counts.states[State(count["state"])] += count["number"]
        if count["operator"] is not None:
            counts.dropped_by[count["operator"]] = count["number"]
    return tasksets
