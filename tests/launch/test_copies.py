"""When a stage copies its experiences, and what becomes of the run where it cannot."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from trinity_data.config import RunConfig, load_pipeline_file
from trinity_data.exchange.buffer_file import Copy
from trinity_data.launch.copies import Copies, copies_of
from trinity_data.schema import rows_to_table
from trinity_data.shutdown import Shutdown
from trinity_data.store.store import Store
from trinity_data.store.types import Commit

FILE = Path(__file__).with_name("fake.yaml")
BUFFER = "stages.grpo.buffer.trainer_input.experience_buffer"
EXPLORED = Copy("sqlite:///explorer_output.db", table="pipeline_input", explored_only=True)


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    return lambda *overrides: load_pipeline_file(FILE, overrides)


@pytest.fixture
def store(small_run: Path, tmp_path: Path) -> Iterator[Store]:
    """Six rows, in the job's folder."""
    shutil.copytree(small_run / "store", tmp_path / "job" / "store")
    with closing(Store.create_or_open(tmp_path / "job" / "store")) as opened:
        yield opened


def made(config: RunConfig, store: Store) -> Copies:
    return Copies(config.stages[1], store, step=2)


def failures_of(store: Store) -> list[str]:
    events = store.table("events").to_pylist()
    return [event["message"] for event in events if (event["kind"], event["step"]) == ("copy_failed", 2)]


def test_a_stage_that_explores_copies_by_default_and_one_that_only_trains_does_not(load) -> None:
    warmup, grpo = load().stages
    assert copies_of(warmup) == []
    assert copies_of(grpo) == [Copy("experience_buffer.jsonl"), EXPLORED]


@pytest.mark.parametrize(
    ("overrides", "paths"),
    [
        (["storage_type=store"], []),
        (["path=sqlite:///gsm8k.db"], ["experience_buffer.jsonl", "sqlite:///gsm8k.db"]),
        (["path=experience_buffer.jsonl"], ["experience_buffer.jsonl"]),
        (["storage_type=sql", "path=sqlite:///gsm8k.db"], ["sqlite:///gsm8k.db"]),
    ],
)
def test_the_file_says_which_copies_there_are(load, overrides: list[str], paths: list[str]) -> None:
    off = "data_processor.experience_pipeline.save_input=false"
    (_, grpo) = load(off, *(f"{BUFFER}.{each}" for each in overrides)).stages
    assert copies_of(grpo) == [Copy(path) for path in paths]


def test_both_files_hold_every_row_and_the_database_has_its_table(load, store: Store) -> None:
    asyncio.run(made(load(), store).write())
    folder = store.root.parent / "buffer"
    lines = (folder / "experience_buffer.jsonl").read_text().splitlines()
    ids = store.table("experiences")["experience_id"].to_pylist()
    assert [json.loads(line)["experience_id"] for line in lines] == ids and len(ids) == 6
    with closing(sqlite3.connect(folder / "explorer_output.db")) as database:
        found = database.execute("SELECT experience_id FROM pipeline_input ORDER BY rowid").fetchall()
    assert [name for (name,) in found] == ids
    assert failures_of(store) == []


def test_a_copy_that_cannot_be_written_is_an_event_and_fails_nothing(load, store: Store) -> None:
    (store.root.parent / "buffer").write_text("a file where the folder should be")
    asyncio.run(made(load(), store).write())
    failures = failures_of(store)
    assert [failure.split("'")[1] for failure in failures] == ["experience_buffer.jsonl", EXPLORED.path]
    assert "File exists" in failures[0] and "its rows are in the store" in failures[0]


def test_a_stop_copies_only_where_there_are_new_rows(load, store: Store) -> None:
    copies, folder = made(load(), store), store.root.parent / "buffer"

    async def stopped() -> None:
        await copies.write_when_stopped(Shutdown())

    asyncio.run(stopped())
    assert not folder.exists()
    row = store.table("experiences").slice(0, 1).to_pylist()[0] | {"experience_id": "new"}
    store.commit(Commit(tables={"experiences": rows_to_table("experiences", [row])}))
    asyncio.run(stopped())
    assert sorted(file.name for file in folder.iterdir()) == ["experience_buffer.jsonl", "explorer_output.db"]


def test_a_cancelled_copy_ends_and_leaves_nothing_half_written(load, store: Store) -> None:
    async def cancelled() -> None:
        writing = asyncio.ensure_future(made(load(), store).write())
        await asyncio.sleep(0)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing

    asyncio.run(cancelled())
    folder = store.root.parent / "buffer"
    assert not list(folder.glob(".*")) if folder.exists() else True
