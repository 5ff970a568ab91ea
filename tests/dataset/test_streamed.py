"""Splits that are read from front to back, as their rows are needed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trinity_data.dataset.in_order import open_in_order
from trinity_data.dataset.reader import DatasetSpec, Source
from trinity_data.dataset.row import Row
from trinity_data.dataset.streamed import SHUFFLED_ROWS, StreamedSource, shuffled
from trinity_data.errors import ConfigError

ROWS: list[dict[str, Any]] = [{"q": f"question {i}", "n": i} for i in range(7)]
Numbered = list[tuple[int, Row]]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def spec(path: Path, split: str = "train", **more: Any) -> DatasetSpec:
    return DatasetSpec(str(path), None, split, streaming=True, **more)


def all_of(source: StreamedSource) -> Numbered:
    return list(source.numbered(range(source.num_rows)))


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_parquet_comes_through_datasets_with_the_numbers_of_its_rows(tmp_path: Path) -> None:
    part = pa.table({"q": ["a", "b"], "score": pa.array([0.1, None], pa.float32()), "parts": [[1], []]})
    pq.write_table(part, tmp_path / "train-00000-of-00002.parquet")
    pq.write_table(part, tmp_path / "train-00001-of-00002.parquet")
    streamed = StreamedSource(spec(tmp_path))
    assert streamed.columns() == ["q", "score", "parts"]
    rows = [{"q": "a", "score": 0.1, "parts": [1]}, {"q": "b", "score": None, "parts": []}]
    assert all_of(streamed) == list(enumerate([*rows, *rows]))


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_lines_are_read_as_they_are_written(tmp_path: Path, suffix: str) -> None:
    text = lines([{"q": "a", "n": 2**70}, {"q": ["b"]}]).replace("\n", "\n\n").encode()
    (tmp_path / f"train.{suffix}").write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
    assert all_of(StreamedSource(spec(tmp_path))) == [(0, {"q": "a", "n": 2**70}), (1, {"q": ["b"]})]


def test_cells_of_csv_are_texts_and_empty_ones_null(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text('q,n\n"a, b",007\nc,\n')
    assert all_of(StreamedSource(spec(tmp_path))) == [
        (0, {"q": "a, b", "n": "007"}),
        (1, {"q": "c", "n": None}),
    ]
    (tmp_path / "train.csv").write_text("q,n\na\n")
    with pytest.raises(ConfigError, match=r"train.csv:2: found 1 cells; there are 2 columns"):
        all_of(StreamedSource(spec(tmp_path)))


@pytest.mark.parametrize("split", ["train", "train[:3]", "train[2:5]", "train[4:]"])
@pytest.mark.parametrize("limit", [None, 2])
def test_a_stream_has_the_rows_and_numbers_of_the_same_split_read_otherwise(
    tmp_path: Path, split: str, limit: int | None
) -> None:
    (tmp_path / "train.jsonl").write_text(lines(ROWS))
    source = Source(DatasetSpec(str(tmp_path), None, split, limit))
    expected = list(source.numbered(range(source.num_rows)))
    assert all_of(StreamedSource(spec(tmp_path, split, limit=limit))) == expected


def test_what_is_behind_the_rows_that_are_asked_for_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(lines(ROWS * 300) + "broken\n")
    streamed = StreamedSource(spec(tmp_path))
    assert [number for number, _ in streamed.numbered(range(3))] == [0, 1, 2]
    assert [number for number, _ in streamed.numbered(range(3, 5))] == [3, 4]
    with pytest.raises(ConfigError, match=r"train.jsonl:2101: not JSON"):
        all_of(streamed)
    skipping = StreamedSource(spec(tmp_path, skip_bad_rows=True))
    assert len(all_of(skipping)) == 2101


def test_a_column_that_only_a_later_row_has_is_found_where_it_is_needed(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(lines([{"q": "a"}] * 150 + [{"q": "b", "late": 1}]))
    streamed = StreamedSource(spec(tmp_path))
    assert streamed.columns() == ["q"] and streamed.columns(["late"]) == ["q", "late"]


def numbers(rows: Iterator[tuple[int, Row]] | Numbered) -> list[int]:
    return [number for number, _ in rows]


def test_shuffled_rows_follow_from_the_seed_and_are_drawn_from_the_next_thousand() -> None:
    def some(count: int, seed: int) -> list[int]:
        return numbers(shuffled(((n, {}) for n in range(count)), seed))

    order = some(5000, 3)
    assert sorted(order) == list(range(5000)) and order != list(range(5000))
    assert all(number < place + SHUFFLED_ROWS for place, number in enumerate(order))
    assert some(5000, 3) == order != some(5000, 4)
    # of a longer set the beginning is the same
    assert some(9000, 3)[:4000] == order[:4000]
    assert sorted(some(10, 3)) == list(range(10))


@pytest.mark.parametrize("seed", [None, 5])
def test_rows_that_were_read_come_first_and_every_other_once_behind_them(
    tmp_path: Path, seed: int | None
) -> None:
    (tmp_path / "train.jsonl").write_text(lines([{"n": i} for i in range(1500)]))
    whole = numbers(all_of(StreamedSource(spec(tmp_path), seed=seed)))
    assert sorted(whole) == list(range(1500))
    resumed = StreamedSource(spec(tmp_path), seed=seed, read=whole[:130])
    assert numbers(resumed.numbered(range(130, 200))) == whole[130:200]
    assert numbers(resumed.numbered(range(200, 2000))) == whole[200:]
    # for operators that keep state
    assert numbers(resumed.numbered(range(64, 140))) == whole[64:140]
    # the set is longer and others were read
    (tmp_path / "train.jsonl").write_text(lines([{"n": i} for i in range(1600)]))
    changed = StreamedSource(spec(tmp_path), seed=seed, read=[3, 700, 9])
    assert sorted([3, 700, 9, *numbers(changed.numbered(range(3, 2000)))]) == list(range(1600))


@pytest.mark.parametrize("split", ["train[-5:]", "train[:10%]", "train+test"])
def test_a_split_that_only_its_end_tells_is_refused(tmp_path: Path, split: str) -> None:
    (tmp_path / "train.jsonl").write_text(lines(ROWS))
    with pytest.raises(ConfigError, match="a stream is of one split, whose end is not known; allowed with"):
        StreamedSource(spec(tmp_path, split))


def test_an_array_and_an_empty_split_are_named(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text(json.dumps(ROWS, indent=1))
    with pytest.raises(ConfigError, match=r"train.json: holds an array, which is read as a whole"):
        StreamedSource(spec(tmp_path)).columns()
    (tmp_path / "train.json").write_text("")
    with pytest.raises(ConfigError, match="split 'train' has no rows"):
        open_in_order(spec(tmp_path), shuffle=False, seed=0)


def test_a_set_is_opened_as_its_configuration_says(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(lines(ROWS))
    source, order = open_in_order(spec(tmp_path), shuffle=True, seed=1)
    streamed = numbers(source.numbered(order[:9]))
    source, order = open_in_order(DatasetSpec(str(tmp_path), None, "train"), shuffle=True, seed=1)
    loaded = numbers(source.numbered(order[:9]))
    assert sorted(streamed) == sorted(loaded) == list(range(7))
    source, order = open_in_order(
        DatasetSpec(str(tmp_path), None, "train"), shuffle=True, seed=1, read=np.array(loaded[:2])
    )
    assert numbers(islice(source.numbered(order), 7)) == loaded
