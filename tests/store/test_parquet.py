"""How sealed rows are laid out in their file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trinity_data.schema import rows_to_table
from trinity_data.store import segments
from trinity_data.store.parquet import write_sealed
from trinity_data.store.reader import StoreReader
from trinity_data.store.segments import CLOSED, Segment
from trinity_data.store.store import Store
from trinity_data.store.types import Commit


def sizes(root: Path, parts: list[pa.Table]) -> list[int]:
    segment = Segment(1, "experiences", CLOSED, "1.arrows", 0, sum(part.num_rows for part in parts), 0, 0)
    written = write_sealed(root, segment, parts, parts[0].schema, epoch=1)
    metadata = pq.read_metadata(root / written.file)
    return [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]


def test_row_groups_are_of_equal_size_with_no_small_one_at_the_end(
    tmp_path: Path, group, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = group(size=64)
    monkeypatch.setattr(segments, "ROW_GROUP_BYTES", rows.nbytes / 3.1)
    assert sizes(tmp_path, [rows]) == [22, 21, 21]
    monkeypatch.setattr(segments, "ROW_GROUP_ROWS", 16)
    assert sizes(tmp_path, [rows]) == [16] * 4


def test_small_parts_share_a_row_group(tmp_path: Path, group) -> None:
    assert sizes(tmp_path, [group(position=number) for number in range(5)]) == [20]


def test_little_more_than_one_row_group_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_to_table("tasks", [{"task_id": str(number), "prompt": "x" * 20_000} for number in range(512)])
    monkeypatch.setattr(segments, "ROW_GROUP_BYTES", rows.nbytes / 8)
    before, held = pa.total_allocated_bytes(), list[int]()

    def parts() -> Iterator[pa.Table]:
        for number in range(32):
            held.append(pa.total_allocated_bytes() - before)
            yield rows.take(np.arange(16 * number, 16 * number + 16))

    segment = Segment(1, "tasks", CLOSED, "1.arrows", 0, rows.num_rows, 0, 0)
    written = write_sealed(tmp_path, segment, parts(), rows.schema, epoch=1)
    assert pq.read_metadata(tmp_path / written.file).num_row_groups == 8
    assert max(held) < 1.5 * rows.nbytes / 8


def test_of_a_sealed_table_only_the_row_groups_around_the_steps_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "ROW_GROUP_ROWS", 4)
    store = Store.create_or_open(tmp_path / "store")
    for step in range(1, 9):
        for stage in ("rl", "other"):
            names = [f"{stage}/{step}/{number}" for number in range(2)]
            rows = [{"group_id": name, "stage": stage, "step": step, "round": 0} for name in names]
            store.commit(Commit(tables={"groups": rows_to_table("groups", rows)}))
    assert StoreReader(store.root).of_steps("groups", "rl", 3, 4, columns=["step"])["step"].to_pylist() == [
        3, 3, 4, 4,
    ]  # fmt: skip
    store.seal()
    store.close()
    reader = StoreReader(store.root)
    found = reader.of_steps("groups", "rl", 3, 4, columns=["group_id"])
    assert found["group_id"].to_pylist() == ["rl/3/0", "rl/3/1", "rl/4/0", "rl/4/1"]
    # four rows are the two stages of a step
    assert [number for _, number, _ in reader._files._decoded] == [2, 3]
    reader.close()
