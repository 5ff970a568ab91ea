"""How sealed rows are laid out in their file."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trinity_data.store import parquet
from trinity_data.store.parquet import write_sealed
from trinity_data.store.segments import CLOSED, Segment


def sizes(root: Path, parts: list[pa.Table]) -> list[int]:
    segment = Segment(1, "experiences", CLOSED, "1.arrows", 0, sum(part.num_rows for part in parts), 0, 0)
    written = write_sealed(root, segment, parts, parts[0].schema, epoch=1)
    metadata = pq.read_metadata(root / written.file)
    return [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]


def test_row_groups_are_of_equal_size_with_no_small_one_at_the_end(
    tmp_path: Path, group, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = group(size=64)
    monkeypatch.setattr(parquet, "_ROW_GROUP_BYTES", rows.nbytes / 3.1)
    assert sizes(tmp_path, [rows]) == [22, 22, 20]
    monkeypatch.setattr(parquet, "_ROW_GROUP_ROWS", 16)
    assert sizes(tmp_path, [rows]) == [16] * 4


def test_small_parts_share_a_row_group(tmp_path: Path, group) -> None:
    assert sizes(tmp_path, [group(position=number) for number in range(5)]) == [20]
