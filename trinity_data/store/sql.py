"""SQL over runs, while they are written or afterwards, from any process.

A session sees one version of each run and can reach nothing else: no files, no extensions,
no settings, no writing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import duckdb
import pyarrow as pa

from trinity_data.errors import StoreError
from trinity_data.runs import distinct_names
from trinity_data.schema import TABLES
from trinity_data.store.snapshot import Snapshot, store_folder, take_snapshot
from trinity_data.store.tags import named_version
from trinity_data.store.task_stats import task_stats
from trinity_data.store.views import (
    JOINED,
    MACROS,
    PLAIN,
    experiences,
    finished_rows,
    quoted,
    stored_rows,
    tokens,
)
from trinity_data.store.yields import operator_yield, step_yield

_LOCKDOWN = (
    "SET temp_directory = ''",
    "SET enable_external_access = false",
    "SET autoinstall_known_extensions = false",
    "SET autoload_known_extensions = false",
    "SET allow_community_extensions = false",
    "SET python_enable_replacements = false",
    "SET lock_configuration = true",
)

# to bind them takes as long as all others together, so that they wait for a query that needs them
BOUND_LATE = {"task_stats": task_stats, "operator_yield": operator_yield, "step_yield": step_yield}

# by its text: DuckDB would plan the query once more to say which tables it names
_MAY_NEED_LATE = re.compile(
    "|".join((*BOUND_LATE, "show", "information_schema", "duckdb_", "pragma", "sqlite_", "pg_")),
    re.IGNORECASE,
)

_COLUMNS = {column for schema in TABLES.values() for column in schema.names}

# errors of these kinds do not come from reading files
_ABOUT_THE_QUERY = (
    duckdb.ParserException,
    duckdb.BinderException,
    duckdb.CatalogException,
    duckdb.ConversionException,
    duckdb.InterruptException,
    duckdb.OutOfMemoryException,
    duckdb.OutOfRangeException,
    duckdb.PermissionException,
)


def open_sql(
    runs: Sequence[Path],
    *,
    timeout_seconds: float | None = 60.0,
    memory_limit: str = "2GB",
    threads: int | None = None,
    verify: bool = False,
    as_of: int | str | None = None,
) -> SqlSession:
    """A session over job folders. With several of them every view has a column `run`, the folder's name.

    `as_of` shows each run as it was when a tag was given, or at the end of a step: what had been written when
    the step's batch was formed, and what training it brought (`batches`, `steps`, `evals`, `model_versions`).
    `verify` reads every file first and sets damaged ones aside; without it DuckDB sees only what breaks the
    format.
    """
    if not runs:
        raise StoreError("no run was named; give at least one job folder")
    snapshots = {}
    for name, run in distinct_names(runs).items():
        root = store_folder(run)
        snapshots[name] = take_snapshot(root, None if as_of is None else named_version(root, as_of))
    if not verify:
        try:
            return SqlSession(snapshots, timeout_seconds, memory_limit, threads)
        except StoreError:
            if not any(snapshot.damage() for snapshot in snapshots.values()):
                raise
    verified = {name: snapshot.verified() for name, snapshot in snapshots.items()}
    return SqlSession(verified, timeout_seconds, memory_limit, threads)


class SqlSession:
    """Answers queries about one version. Open another one to see what came after.

    `derived` takes the states of all experiences from outcomes and state changes,
    and not from what sealed files say of them. With `where`, queries see the stored tables that it names and
    `task_stats` over them, and of each table the rows for which its condition holds.
    """

    def __init__(
        self,
        snapshots: dict[str, Snapshot],
        timeout_seconds: float | None,
        memory_limit: str,
        threads: int | None,
        *,
        derived: bool = False,
        where: Mapping[str, str] | None = None,
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._snapshots = dict(snapshots)
        self._memory_limit, self._threads = memory_limit, threads
        self._derived, self._where = derived, where
        self._registered: dict[str, pa.Table] = {}
        self._defined: dict[str, str] = {}
        with _in_words(timeout_seconds):
            self._connection = self._connect()
            self._create()

    @property
    def damaged(self) -> list[str]:
        """Segments that were set aside; answers lack their rows."""
        return [problem for snapshot in self._snapshots.values() for problem in snapshot.damaged]

    def query(self, sql: str) -> pa.Table:
        """The rows that one SELECT gives. Raises StoreError in DuckDB's words, or when it takes too long."""
        with _in_words(self._timeout_seconds):
            statements = self._connection.extract_statements(sql)
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                raise StoreError(
                    "one query at a time, and only queries: SELECT, FROM, WITH, VALUES, DESCRIBE, SUMMARIZE, "
                    "SHOW (and PIVOT only with its values named by IN)"
                )
            while True:
                try:
                    self._bind_late_views(sql)
                    return _with_int64(self._connection.sql(sql).to_arrow_table())
                except duckdb.Error as error:
                    # of a file that is gone DuckDB says that it may not look for it
                    files_are_there = not any(each.misses_files() for each in self._snapshots.values())
                    if isinstance(error, _ABOUT_THE_QUERY) and files_are_there:
                        raise
                    if self._renew():
                        self._create()
                        continue
                    self._name_damage()
                    raise

    def register(self, name: str, rows: pa.Table) -> None:
        """Lets queries of this session use a table of the caller's."""
        self._registered[name] = rows
        self._connection.register(name, rows)

    def define(self, name: str, query: str) -> None:
        """Lets queries of this session use the rows of a query by a name; only what they use is computed."""
        self._defined[name] = query
        with _in_words(self._timeout_seconds):
            self._create_view("main", name, query)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> SqlSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connect(self) -> duckdb.DuckDBPyConnection:
        connection = duckdb.connect(":memory:")
        connection.execute(f"SET memory_limit = {quoted(self._memory_limit)}")
        # sealed files never change
        connection.execute("SET parquet_metadata_cache = true")
        connection.execute("SET validate_external_file_cache = 'NO_VALIDATION'")
        if self._timeout_seconds is not None:
            milliseconds = max(1, round(self._timeout_seconds * 1000))
            connection.execute(f"SET max_execution_time = {milliseconds}")
        if self._threads is not None:
            connection.execute(f"SET threads = {self._threads}")
        return connection

    def _create(self) -> None:
        """Fills an empty connection, and locks it; again as long as files are merged meanwhile."""
        while True:
            try:
                self._fill()
                return
            except duckdb.Error:
                if not self._renew():
                    self._name_damage()
                    raise

    def _fill(self) -> None:
        for schema, snapshot in self._schemas().items():
            if schema != "main":
                self._connection.execute(f"CREATE SCHEMA {schema}")
            self._create_run(schema, snapshot)
        self._unite(*PLAIN, *JOINED)
        self._has_late_views = False
        for macro in MACROS:
            self._connection.execute(macro)
        self._lock_down()
        for name, rows in self._registered.items():
            self._connection.register(name, rows)
        for name, query in self._defined.items():
            self._create_view("main", name, query)

    def _schemas(self) -> dict[str, Snapshot]:
        names = [f"run_{number}" for number in range(len(self._snapshots))]
        return dict(zip(names if len(names) > 1 else ["main"], self._snapshots.values(), strict=True))

    def _unite(self, *views: str) -> None:
        """Those of several runs as one, with a column `run`."""
        if len(self._snapshots) == 1:
            return
        for view in views:
            parts = [
                f"SELECT {quoted(name)} AS run, * FROM {schema}.{view}"
                for name, schema in zip(self._snapshots, self._schemas(), strict=True)
            ]
            self._create_view("main", view, " UNION ALL BY NAME ".join(parts))

    def _bind_late_views(self, sql: str) -> None:
        """Creates them where the query names one, or may list all names."""
        if self._has_late_views or not _MAY_NEED_LATE.search(sql):
            return
        views = BOUND_LATE if self._where is None else {"task_stats": task_stats}
        for name, rows in views.items():
            for schema in self._schemas():
                self._create_view(schema, name, rows(schema))
        self._unite(*views)
        self._has_late_views = True

    def _renew(self) -> bool:
        """Looks for the same rows in other files, since small files are merged while somebody reads them."""
        newer = {name: snapshot.renewed() for name, snapshot in self._snapshots.items()}
        renewed = {name: snapshot for name, snapshot in newer.items() if snapshot is not None}
        for name, snapshot in renewed.items():
            before = self._snapshots[name].damaged
            if before:
                renewed[name] = snapshot.verified()
            if not set(renewed[name].damaged) <= set(before):
                return False  # some rows are nowhere any more
        if not renewed:
            return False
        self._snapshots |= renewed
        self._connection.close()
        self._connection = self._connect()
        return True

    def _name_damage(self) -> None:
        """Raises for damaged files, which DuckDB's own words may not name."""
        damaged = [problem for snapshot in self._snapshots.values() for problem in snapshot.damage().values()]
        if damaged:
            raise StoreError("; ".join(damaged))

    def _create_run(self, schema: str, snapshot: Snapshot) -> None:
        for view, table in PLAIN.items():
            if self._where is not None and view not in self._where:
                continue
            hot = f"{schema}_{table}_hot"
            rows = stored_rows(snapshot, table, hot)
            if hot in rows:
                self._connection.register(hot, snapshot.hot[table])
            seen = "" if self._where is None else f" WHERE {self._where[view]}"
            self._create_view(schema, view, f"FROM ({rows}){seen}" if seen else rows)
        if self._where is not None:
            return
        shown = replace(snapshot, final={}) if self._derived else snapshot
        hot = f"{schema}_experiences_hot"
        try:
            ((replayed,),) = self._connection.execute(
                f"SELECT EXISTS (FROM {schema}.state_changes WHERE state = 'replayed')"
            ).fetchall()
        except duckdb.Error:  # a damaged file is named when a query needs it
            replayed = True
        # a join less where no row was trained again
        self._create_view(schema, "experiences", experiences(schema, shown, hot, replayed=replayed))
        self._create_view(schema, "tokens", tokens(schema))
        if self._derived and (finished := finished_rows(snapshot)):
            self._create_view(schema, "finished", finished)

    def _create_view(self, schema: str, name: str, rows: str) -> None:
        self._connection.execute(f"CREATE OR REPLACE VIEW {schema}.{name} AS {rows}")

    def _lock_down(self) -> None:
        """Leaves exactly the Parquet files of the snapshots within reach.

        Order matters, the last one is final.
        """
        files = [
            file
            for snapshot in self._snapshots.values()
            for paths in snapshot.sealed.values()
            for file in paths
        ]
        paths = ", ".join(quoted(str(file)) for file in files)
        self._connection.execute(f"SET allowed_paths = [{paths}]")
        for statement in _LOCKDOWN:
            self._connection.execute(statement)


@contextmanager
def _in_words(timeout_seconds: float | None) -> Iterator[None]:
    """DuckDB's errors as one paragraph, without the listing of the query."""
    try:
        yield
    except duckdb.Error as error:
        if isinstance(error, duckdb.InterruptException) and "maximum execution time" in str(error):
            raise StoreError(f"the query took longer than {timeout_seconds:g} s") from None
        message = " ".join(re.split(r"\n\s*\nLINE \d+:", str(error))[0].split())
        near = re.search(r'syntax error at or near "(\w+)"', message)
        if near is not None and near[1].lower() in _COLUMNS:
            word = near[1]
            message += (
                f'; {word!r} is a word of SQL: write `as {word}` to name a result, "{word}" for the column'
            )
        # its words are all in the message
        raise StoreError(message) from None


def _with_int64(rows: pa.Table) -> pa.Table:
    """Sums of integers, which DuckDB gives 128 bits, as int64 where they fit."""
    for number, field in enumerate(rows.schema):
        if pa.types.is_decimal(field.type) and field.type.scale == 0:
            # a sum that does not fit stays as it is
            with suppress(pa.ArrowInvalid):
                rows = rows.set_column(number, field.name, rows[field.name].cast(pa.int64()))
    return rows
