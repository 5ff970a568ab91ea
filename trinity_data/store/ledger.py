"""The ledger: one SQLite file that says which rows exist, where they are, and what happened to them.

One process writes it, known by its epoch; every write transaction checks the epoch first, so an older writer
stops. A ledger may come from anybody: one with other tables than ours, or with views or triggers, is refused
when it is opened.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from time import monotonic

from trinity_data.errors import StoreError, StoreLockedError
from trinity_data.store.segments import check_folders

LEDGER_FILE = "ledger.sqlite"
FORMAT = 3
"""Goes up with every change of these tables, and of the columns in `schema`."""

# what no question of ours comes near, even of 10^7 experiences;
# a ledger made to be slow does not block without end
MAX_SECONDS = 600.0
_INSTRUCTIONS = 1_000_000  # of SQLite between two looks at the clock: some ten milliseconds
_SETTINGS = ("journal_mode = WAL", "synchronous = FULL", "temp_store = MEMORY", "cache_size = -65536")

_TABLES = """
CREATE TABLE writer (epoch INTEGER NOT NULL, sequence INTEGER NOT NULL);
INSERT INTO writer VALUES (0, 0);
CREATE TABLE segments (
    segment INTEGER PRIMARY KEY,
    table_name TEXT NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('tail', 'closed', 'sealed')),
    file TEXT NOT NULL UNIQUE,
    first_row INTEGER NOT NULL,
    num_rows INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL,
    checksum INTEGER NOT NULL,
    num_final INTEGER NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX segments_in_order ON segments (table_name, first_row, segment);
CREATE TABLE experiences (
    row INTEGER PRIMARY KEY,
    experience_id TEXT NOT NULL UNIQUE,
    stage TEXT NOT NULL,
    step INTEGER NOT NULL,
    position INTEGER NOT NULL,
    rollout INTEGER NOT NULL,
    turn INTEGER NOT NULL,
    state TEXT NOT NULL,
    settled INTEGER NOT NULL DEFAULT 0,
    advantage REAL,
    shaped_reward REAL
);
CREATE INDEX experiences_in_order ON experiences (stage, step, position, rollout, turn);
CREATE INDEX experiences_pending ON experiences (stage, step, position, rollout, turn)
    WHERE state = 'pending';
CREATE INDEX experiences_raw ON experiences (stage, step, position, rollout, turn) WHERE state = 'raw';
CREATE TABLE tallies (
    stage TEXT NOT NULL,
    step INTEGER NOT NULL,
    state TEXT NOT NULL,
    num_rows INTEGER NOT NULL,
    PRIMARY KEY (stage, step, state)
) WITHOUT ROWID;
CREATE TABLE batches (
    step INTEGER PRIMARY KEY,
    stage TEXT NOT NULL,
    num_rows INTEGER NOT NULL,
    sequence INTEGER NOT NULL
);
CREATE TABLE batch_rows (
    step INTEGER NOT NULL,
    position INTEGER NOT NULL,
    row INTEGER NOT NULL,
    PRIMARY KEY (step, position)
) WITHOUT ROWID;
CREATE INDEX batch_rows_by_row ON batch_rows (row);
CREATE TABLE progress (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE checkpoints (
    step INTEGER PRIMARY KEY,
    stage TEXT NOT NULL,
    path TEXT NOT NULL,
    sequence INTEGER NOT NULL
);
CREATE TABLE snapshots (sequence INTEGER PRIMARY KEY, num_rows TEXT NOT NULL);
"""

# made when it is first needed, so that a store which never expired anything stays as it was
EXPIRED_TABLE = """
CREATE TABLE IF NOT EXISTS expired (
    first_row INTEGER PRIMARY KEY,
    num_rows INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL,
    at TEXT NOT NULL
)
"""


def open_for_writing(root: Path) -> sqlite3.Connection:
    """The ledger below `root`, made when missing. A writer must `take_epoch` first."""
    with naming_errors(root):
        connection = sqlite3.connect(
            root / LEDGER_FILE, isolation_level=None, check_same_thread=False, timeout=30
        )
        try:
            connection.execute("PRAGMA trusted_schema = OFF")
            if _format(connection) or _schema(connection):
                _check(root, connection)  # before anything is written
            for setting in _SETTINGS:
                connection.execute(f"PRAGMA {setting}")
            with transaction(connection):
                if _format(connection) == 0:
                    for statement in filter(str.strip, _TABLES.split(";")):
                        connection.execute(statement)
                    connection.execute(f"PRAGMA user_version = {FORMAT}")
        except BaseException:
            connection.close()
            raise
    _check(root, connection)
    return connection


def open_for_reading(root: Path) -> sqlite3.Connection:
    """The ledger below `root`, beside its writer."""
    with naming_errors(root):
        try:
            connection = _connect_read_only(_existing(root), "mode=ro")
        except sqlite3.OperationalError:
            if is_in_use(root):
                raise
            # a read-only disk: without a log there is nothing to share,
            # and SQLite need not make its side files
            connection = _connect_read_only(_existing(root), "immutable=1")
    _check(root, connection)
    return connection


def open_ended(root: Path) -> sqlite3.Connection:
    """The ledger of a run that has ended, read without leaving a trace.

    Ask `is_in_use` before and afterwards.
    """
    with naming_errors(root):
        connection = _connect_read_only(_existing(root), "immutable=1")
    _check(root, connection)
    return connection


def is_in_use(root: Path) -> bool:
    """Whether a process has the ledger open for writing, or left it so when it was killed."""
    return (root / f"{LEDGER_FILE}-wal").exists()


def take_epoch(connection: sqlite3.Connection) -> int:
    """Becomes the writer, inside a transaction; every older writer is fenced from here on."""
    (epoch,) = connection.execute("SELECT epoch FROM writer").fetchone() or (None,)
    if not isinstance(epoch, int):
        raise StoreError(f"{LEDGER_FILE} is damaged: it does not say who may write; restore it from a copy")
    connection.execute("UPDATE writer SET epoch = ?", (epoch + 1,))
    return epoch + 1


def check_epoch(connection: sqlite3.Connection, epoch: int) -> None:
    """Refuses to go on as a writer that another one has replaced."""
    current = connection.execute("SELECT epoch FROM writer").fetchone()[0]
    if current != epoch:
        raise StoreLockedError(
            f"another process has become the writer of this store (epoch {current}, ours is {epoch}); "
            "only one run may write a job folder at a time: stop one of them"
        )


def damage(connection: sqlite3.Connection) -> list[str]:
    """What is wrong with the ledger as a file: torn pages, indexes that miss rows. Reads all of it."""
    lines = [row[0] for row in connection.execute("PRAGMA integrity_check(20)")]
    reasons = [" ".join(line.split()) for line in lines if line != "ok"]
    return [f"{LEDGER_FILE} is damaged: {reason}" for reason in reasons]


@contextmanager
def transaction(connection: sqlite3.Connection, mode: str = "IMMEDIATE") -> Iterator[None]:
    """Commits when the block ends, rolls back when it raises. IMMEDIATE takes the write lock at once.

    A statement that still runs MAX_SECONDS after the beginning is interrupted.
    """
    connection.execute(f"BEGIN {mode}")
    end = monotonic() + MAX_SECONDS
    connection.set_progress_handler(lambda: monotonic() > end, _INSTRUCTIONS)
    try:
        yield
        connection.set_progress_handler(None, 0)
        connection.execute("COMMIT")
    except BaseException:
        connection.set_progress_handler(None, 0)
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


@contextmanager
def naming_errors(root: Path) -> Iterator[None]:
    """Lets the errors of SQLite and of the disk name what they are about."""
    try:
        yield
    except sqlite3.Error as error:
        raise StoreError(f"{root / LEDGER_FILE}: {error}") from error
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"cannot use the store {root}: {error}") from error


def _existing(root: Path) -> Path:
    path = root / LEDGER_FILE
    if not path.exists():
        raise StoreError(f"{root} holds no store: {LEDGER_FILE} is not there")
    return path


def _connect_read_only(path: Path, option: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.resolve().as_uri()}?{option}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=30,
    )
    try:
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA query_only = ON")
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _format(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _check(root: Path, connection: sqlite3.Connection) -> None:
    """Closes the connection and raises for a store that this version did not make so."""
    try:
        with naming_errors(root):
            check_folders(root)
            if (version := _format(connection)) != FORMAT:
                raise StoreError(
                    f"{root / LEDGER_FILE} has format {version}; this version reads format {FORMAT}: "
                    "read it with the version that wrote it, or start a new run"
                )
            _check_schema(root, connection)
    except BaseException:
        connection.close()
        raise


def _check_schema(root: Path, connection: sqlite3.Connection) -> None:
    """Tables and indexes as this version makes them, and nothing else:
    a view or trigger would run as part of our statements.
    """
    schema, expected = _schema(connection), _expected_schema()
    wrong = [name for name in schema if schema[name] != expected.get(name)]
    missing = [name for name in expected if name not in schema and name != "expired"]
    if wrong or missing:
        what = f"has {wrong[0]!r}, which is not as" if wrong else f"lacks {missing[0]!r}, which"
        raise StoreError(
            f"{root / LEDGER_FILE} {what} this version makes it: the ledger is damaged, "
            "or was changed by somebody; nothing was read from it, restore it from a copy"
        )


def _schema(connection: sqlite3.Connection) -> dict[str, tuple[str, str, str]]:
    """Type, table and text of everything in the ledger by name, without SQLite's own statistics and keys."""
    entries = connection.execute("SELECT name, type, tbl_name, sql FROM sqlite_master").fetchall()
    return {
        str(name): (kind, table, " ".join(str(sql).split()))
        for name, kind, table, sql in entries
        if not (kind == "table" and str(name).startswith("sqlite_stat")) and sql is not None
    }


@cache
def _expected_schema() -> dict[str, tuple[str, str, str]]:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(_TABLES + EXPIRED_TABLE)
        return _schema(connection)
