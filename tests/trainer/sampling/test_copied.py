"""A run's copy as the training data of another: the rows that were kept,
with their rewards and advantages.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from trinity_data.config import ExperienceBufferConfig, ModelConfig
from trinity_data.errors import ConfigError
from trinity_data.exchange.buffer_file import Copy, write_buffer_file
from trinity_data.query.audit import audit
from trinity_data.store.store import Store
from trinity_data.store.types import Commit, State
from trinity_trainer.datasets import build_dataset
from trinity_trainer.offline_sampler import OfflineDataset, OfflineSampler

if TYPE_CHECKING:
    from conftest import Put


def rows_of(path: str, folder: Path) -> OfflineDataset:
    storage = "sql" if "://" in path else "file"
    config = ExperienceBufferConfig(storage_type=storage, path=path, schema_type="experience")
    return build_dataset(config, None, None, ModelConfig(model_path="x"), folder=folder)


@pytest.mark.parametrize("path", ["sqlite:///rows.db", "duckdb:///rows.duckdb", "rows.jsonl", "rows"])
def test_a_copy_is_trained_with_its_tokens_logprobs_and_advantages(
    store: Store, put: Put, tmp_path: Path, path: str
) -> None:
    ids = put(1, (4,))
    write_buffer_file(store, Copy(path), tmp_path / "buffer")
    data = rows_of(path, tmp_path / "buffer")
    assert data.num_units == 4
    other = Store.create_or_open(tmp_path / "other" / "store")
    batches = OfflineSampler(other, data, stage="train", first_step=1, batch_size=4, seed=0)
    batch = asyncio.run(batches.next(1))
    assert batch is not None and batch[0] == "data/train/0000001/00000/000/00"
    other.form_batch("train", 1, batch)
    rows = other.read(batch).to_pylist()
    assert {row["advantage"] for row in rows} == {1.0} and rows[0]["logprobs"] == [-0.5, -0.5]
    origins = [json.loads(row["info"])["origin"] for row in rows]
    assert sorted(origin["experience_id"] for origin in origins) == ids
    assert {origin["source"] for origin in origins} == {path}
    other.close()
    report = audit(tmp_path / "other")
    assert report.problems == []
    assert {name: books.states[State.TRAINED] for name, books in report.tasksets.items()} == {
        f"training data {Path(path).name}": 4
    }


def test_a_copy_without_a_kept_row_is_named(store: Store, put: Put, tmp_path: Path) -> None:
    ids = put(1, (1,))
    store.commit(Commit(states=[(ids[0], State.DROPPED)]))
    write_buffer_file(store, Copy("rows.jsonl"), tmp_path)
    line = json.loads((tmp_path / "rows.jsonl").read_text()) | {"kept": False}
    (tmp_path / "rows.jsonl").write_text(json.dumps(line))
    with pytest.raises(
        ConfigError, match=r"experience_buffer\.path: found 'rows\.jsonl', which holds no row"
    ):
        rows_of("rows.jsonl", tmp_path)
