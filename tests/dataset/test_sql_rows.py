from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import duckdb
import pytest

from trinity_data.config import TasksetConfig
from trinity_data.dataset.reader import Source, dataset_spec
from trinity_data.dataset.sql_rows import SqlQuery, SqlRows
from trinity_data.errors import ConfigError


@pytest.fixture
def sqlite_file(tmp_path: Path) -> Path:
    file = tmp_path / "tasks.db"
    with closing(sqlite3.connect(file)) as database:
        database.execute("create table tasks (id integer, q text, a, level integer)")
        rows = [(3, "c", 7.5, 1), (1, "a", "5", 1), (2, "b", None, 2)]
        database.executemany("insert into tasks values (?, ?, ?, ?)", rows)
        database.commit()
    return file


def rows_of(path: Path | str, query: str = "tasks", order_by: str = "id") -> list[dict[str, object]]:
    rows = SqlRows(SqlQuery(str(path), query, order_by))
    return [rows[number] for number in range(len(rows))]


def test_a_table_is_read_in_the_order_of_its_key(sqlite_file: Path) -> None:
    expected = [
        {"id": 1, "q": "a", "a": "5", "level": 1},
        {"id": 2, "q": "b", "a": None, "level": 2},
        {"id": 3, "q": "c", "a": 7.5, "level": 1},
    ]
    assert rows_of(sqlite_file) == rows_of(f"sqlite:///{sqlite_file}") == expected
    assert rows_of(sqlite_file, order_by="level, id") == [expected[0], expected[2], expected[1]]


def test_a_query_selects_and_names(sqlite_file: Path) -> None:
    query = "select id, q || '?' as question from tasks where level = 1; -- easy ones"
    assert rows_of(sqlite_file, query.replace(";", "")) == [
        {"id": 1, "question": "a?"},
        {"id": 3, "question": "c?"},
    ]


def test_nested_values_of_duckdb_are_objects_and_lists(tmp_path: Path) -> None:
    file = tmp_path / "tasks.duckdb"
    with duckdb.connect(str(file)) as database:
        database.execute(
            "create table tasks as select 1 as id, {'a': [1, 2]} as extra, 1.50::decimal(4,2) as n"
        )
    assert rows_of(f"duckdb:///{file}") == [{"id": 1, "extra": {"a": [1, 2]}, "n": "1.50"}]


@pytest.mark.parametrize(
    ("query", "order_by", "message"),
    [
        ("tasks", "level", r"order_by: two rows have level = 1, so that their order may change"),
        ("tasks", "ids", r"order_by: has no column 'ids'; it has id, q, a, level \(did you mean 'id'\?\)"),
        ("task", "id", r"query 'task': no such table: task"),
        ("delete from tasks", "id", r"query 'delete from tasks': near \"delete\": syntax error"),
    ],
)
def test_a_query_that_gives_no_rows_in_order_is_refused(
    sqlite_file: Path, query: str, order_by: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        rows_of(sqlite_file, query, order_by)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tasks.db").write_text("id,q\n1,a\n")
    with pytest.raises(ConfigError, match=r"tasks\.db: neither a SQLite nor a DuckDB database"):
        rows_of(tmp_path / "tasks.db")
    with pytest.raises(ConfigError, match=r"sqlite:///no\.db: no such file"):
        rows_of("sqlite:///no.db")


def test_text_that_is_not_utf_8_names_the_query(sqlite_file: Path) -> None:
    with closing(sqlite3.connect(sqlite_file)) as database:
        database.execute("insert into tasks values (4, cast(x'ff' as text), 1, 3)")
        database.commit()
    with pytest.raises(ConfigError, match=r"query 'tasks': Could not decode to UTF-8"):
        rows_of(sqlite_file)


def test_the_digest_is_of_the_rows_alone(sqlite_file: Path) -> None:
    easy, every = (
        SqlQuery(str(sqlite_file), query, "id") for query in ("select * from tasks where level = 1", "tasks")
    )
    before = SqlRows(easy).digest, SqlRows(every).digest
    with closing(sqlite3.connect(sqlite_file)) as database:
        database.execute("update tasks set q = 'B' where id = 2")
        database.commit()
    assert SqlRows(easy).digest == before[0]
    assert SqlRows(every).digest != before[1]


def test_what_is_written_while_the_rows_are_read_is_not_seen(sqlite_file: Path) -> None:
    rows = SqlRows(SqlQuery(str(sqlite_file), "tasks", "id"))
    with closing(sqlite3.connect(sqlite_file)) as database:
        database.execute("delete from tasks")
        database.commit()
    assert [rows[number]["id"] for number in (2, 0)] == [3, 1]


def test_a_task_set_of_a_database_is_a_source_with_numbered_rows(sqlite_file: Path) -> None:
    config = TasksetConfig(
        name="t", storage_type="sql", path=str(sqlite_file), query="tasks", order_by="id", limit=2
    )
    source = Source(dataset_spec(config))
    assert (source.num_rows, source.columns()) == (2, ["id", "q", "a", "level"])
    assert [row["q"] for row in source.rows([1, 0])] == ["b", "a"]
    assert source.row_numbers([1, 0]) == [1, 0]
