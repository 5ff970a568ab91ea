"""Copies for other tools: every kind keeps every column, and can be read back as it was."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trinity_data.errors import ConfigError
from trinity_data.exchange.buffer_file import (
    COPIED,
    Copy,
    CopyCancelledError,
    read_buffer_file,
    write_buffer_file,
)
from trinity_data.schema import EXPERIENCES
from trinity_data.store.store import Store
from trinity_data.store.types import Commit

KINDS = ["sqlite:///gsm8k.db", "duckdb:///gsm8k.duckdb", "experience_buffer.jsonl", "rows"]


@pytest.fixture
def filled(store: Store, group, outcomes) -> Store:
    """Four rows: one dropped, one failed, one that nobody judged, and one whose reward became 10."""
    rows = group(1, failed=(2,))
    names = rows.column_names.index("explorer")
    rows = rows.set_column(names, "explorer", pa.array(["explorer", "explorer", "", "explorer"]))
    store.commit(Commit(tables={"experiences": rows, "outcomes": outcomes(rows.slice(0, 2), dropped=(1,))}))
    return store


@pytest.mark.parametrize("path", KINDS)
def test_every_kind_gives_back_the_rows_as_they_were(filled: Store, tmp_path: Path, path: str) -> None:
    write_buffer_file(filled, Copy(path), tmp_path / "buffer")
    rows = read_buffer_file(path, tmp_path / "buffer")
    assert rows.schema.equals(COPIED)
    original = filled.table("experiences")
    assert rows.select(EXPERIENCES.names).to_pylist() == original.to_pylist()
    assert rows["token_ids"].to_pylist()[3] == [10, 11, 23, 33, 43]
    assert rows["logprobs"].to_pylist() == [[-0.5, -0.25, -0.125]] * 4
    judged = rows.select(["shaped_reward", "advantage", "kept", "dropped_by"]).to_pylist()
    assert [tuple(row.values()) for row in judged] == [
        (10.0, -0.5, True, ""), (11.0, 0.5, False, "reward_filter"), (None,) * 4, (None,) * 4,
    ]  # fmt: skip


def test_the_sqlite_copy_has_typed_columns_and_keeps_tokens_and_logprobs(
    filled: Store, tmp_path: Path
) -> None:
    target = write_buffer_file(filled, Copy("sqlite:///gsm8k.db"), tmp_path / "buffer")
    with sqlite3.connect(target) as connection:
        row = connection.execute(
            "SELECT reward, typeof(reward), typeof(step), token_ids, logprobs FROM experiences LIMIT 1"
        ).fetchall()
    assert row == [(0.0, "real", "integer", "[10,11,20,30,40]", "[-0.5,-0.25,-0.125]")]


def test_the_other_copies_are_plain_files_of_their_kind(filled: Store, tmp_path: Path) -> None:
    lines, folder, database = (
        write_buffer_file(filled, Copy(path), tmp_path) for path in (KINDS[2], KINDS[3], KINDS[1])
    )
    assert [json.loads(line)["rollout"] for line in lines.read_text().splitlines()] == [0, 1, 2, 3]
    assert pq.read_table(folder).num_rows == 4
    with duckdb.connect(str(database), read_only=True) as connection:
        assert connection.execute("SELECT sum(len(token_ids)) FROM experiences").fetchall() == [(20,)]


@pytest.mark.parametrize("path", KINDS)
def test_a_copy_is_renewed_whole(filled: Store, tmp_path: Path, path: str, group) -> None:
    write_buffer_file(filled, Copy(path), tmp_path)
    filled.commit(Commit(tables={"experiences": group(2)}))
    write_buffer_file(filled, Copy(path), tmp_path)
    assert read_buffer_file(path, tmp_path).num_rows == 8
    assert [entry.name for entry in tmp_path.glob(".*")] == []


def test_the_explorers_output_leaves_out_what_came_from_elsewhere(filled: Store, tmp_path: Path) -> None:
    write_buffer_file(filled, Copy("sqlite:///explorer_output.db", explored_only=True), tmp_path)
    assert read_buffer_file("sqlite:///explorer_output.db", tmp_path)["rollout"].to_pylist() == [0, 1, 3]


@pytest.mark.parametrize("path", ["sqlite:///x.db", "duckdb:///x.duckdb"])
def test_a_table_of_another_name_is_read_back_too(filled: Store, tmp_path: Path, path: str) -> None:
    write_buffer_file(filled, Copy(path, table="pipeline_input"), tmp_path)
    assert read_buffer_file(path, tmp_path).num_rows == 4


@pytest.mark.parametrize("path", KINDS)
def test_a_cancelled_copy_leaves_the_one_before_as_it_was(
    filled: Store, tmp_path: Path, path: str, group
) -> None:
    write_buffer_file(filled, Copy(path), tmp_path)
    filled.commit(Commit(tables={"experiences": group(2)}))
    with pytest.raises(CopyCancelledError):
        write_buffer_file(filled, Copy(path), tmp_path, is_cancelled=lambda: True)
    assert read_buffer_file(path, tmp_path).num_rows == 4
    assert [entry.name for entry in tmp_path.glob(".*")] == []


def test_rows_are_copied_in_order_from_sealed_files_and_tails(store: Store, tmp_path: Path, group) -> None:
    for step in range(1, 4):
        store.commit(Commit(tables={"experiences": group(step)}))
        if step < 3:
            store.seal()
    target = write_buffer_file(store, Copy("x.jsonl"), tmp_path)
    steps = [json.loads(line)["step"] for line in target.read_text().splitlines()]
    assert steps == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert json.loads(target.read_text().splitlines()[1])["reward_parts"] == {"accuracy": 1.0}


def test_another_kind_of_path_is_refused(filled: Store, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"postgresql:// is no buffer; allowed: sqlite:///NAME\.db, duckdb"):
        write_buffer_file(filled, Copy("postgresql://x"), tmp_path)


@pytest.mark.parametrize("path", ["sqlite:///x.db", "duckdb:///x.db", "x.jsonl"])
def test_a_file_that_is_no_copy_is_named(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError, match=r"there is no x\.(db|jsonl), and none in"):
        read_buffer_file(path, tmp_path)
    (tmp_path / path.removeprefix("sqlite:///").removeprefix("duckdb:///")).write_text("no such format\n")
    with pytest.raises(ConfigError, match="which holds no experiences that can be read"):
        read_buffer_file(path, tmp_path)


def test_rows_without_tokens_are_no_copy(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"experience_id": "a", "reward": 1.0}\n')
    with pytest.raises(ConfigError, match="has no column 'token_ids'; it holds no experiences of a run"):
        read_buffer_file("x.jsonl", tmp_path)
