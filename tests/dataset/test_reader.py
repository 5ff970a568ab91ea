from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from trinity_data.dataset.reader import DatasetSpec, Source, behind, row_order
from trinity_data.errors import ConfigError

ROWS = [{"q": f"question {i}", "n": i} for i in range(7)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(file: Path, rows: list[dict[str, object]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".gz":
        write(file.with_suffix(""), rows)
        file.write_bytes(gzip.compress(file.with_suffix("").read_bytes()))
        file.with_suffix("").unlink()
    elif file.suffix == ".parquet":
        pa.parquet.write_table(pa.Table.from_pylist(rows), file)
    elif file.suffix == ".csv":
        pa.csv.write_csv(pa.Table.from_pylist(rows), file)
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows))
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(path: Path, split: str = "train", subset: str | None = None) -> list[dict[str, object]]:
    return all_of(Source(DatasetSpec(str(path), subset, split)))


def all_of(source: Source) -> list[dict[str, object]]:
    return list(source.rows(range(source.num_rows)))


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "csv", "jsonl.gz", "json.gz", "csv.gz"])
@pytest.mark.parametrize("as_file", [False, True])
def test_every_format_is_read_as_a_folder_and_as_a_file(tmp_path: Path, suffix: str, as_file: bool) -> None:
    file = tmp_path / "data" / f"train.{suffix}"
    write(file, ROWS)
    assert read(file if as_file else file.parent) == ROWS


def test_a_split_is_found_by_the_names_of_its_files(tmp_path: Path) -> None:
    write(tmp_path / "train-00000-of-00002.parquet", ROWS[:3])
    write(tmp_path / "train-00001-of-00002.parquet", ROWS[3:])
    write(tmp_path / "test-00000-of-00001.parquet", ROWS[:1])
    assert read(tmp_path) == ROWS
    assert read(tmp_path, "test") == ROWS[:1]


def test_a_split_may_be_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "train" / "part.jsonl", ROWS)
    write(tmp_path / "test" / "part.jsonl", ROWS[:2])
    assert read(tmp_path, "test") == ROWS[:2]


def test_a_subset_is_a_folder_above_the_splits(tmp_path: Path) -> None:
    write(tmp_path / "main" / "train.jsonl", ROWS)
    write(tmp_path / "socratic" / "train.jsonl", ROWS[:2])
    assert read(tmp_path, subset="socratic") == ROWS[:2]


def test_a_misspelt_subset_is_refused_instead_of_reading_all(tmp_path: Path) -> None:
    write(tmp_path / "main" / "train.jsonl", ROWS)
    write(tmp_path / "socratic" / "train.jsonl", ROWS[:2])
    with pytest.raises(
        ConfigError, match=r"no subset 'socrates'; there is main, socratic \(did you mean 'socratic'"
    ):
        read(tmp_path, subset="socrates")


@pytest.mark.parametrize("folder", ["", "train", "data"])
def test_a_folder_without_subsets_may_be_read_under_any_name(tmp_path: Path, folder: str) -> None:
    write(tmp_path / folder / "train.jsonl", ROWS)
    assert read(tmp_path, subset="main") == ROWS


def test_a_wrong_description_beside_the_files_is_not_believed(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS)
    wrong = {"main": {"features": {"other": {"dtype": "int64"}}, "splits": {"train": {"num_examples": 99}}}}
    (tmp_path / "dataset_infos.json").write_text(json.dumps(wrong))
    assert read(tmp_path) == ROWS


def test_the_real_gsm8k_is_read_whole(shared_gsm8k: Path) -> None:
    assert Source(DatasetSpec(str(shared_gsm8k), "main", "train")).num_rows == 7473
    assert Source(DatasetSpec(str(shared_gsm8k), None, "test")).num_rows == 1319


def test_a_missing_split_is_named_with_those_there_are(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS)
    write(tmp_path / "test.jsonl", ROWS)
    with pytest.raises(
        ConfigError, match=r"no file of split 'tests'; there is test, train \(did you mean 'test'\?\)"
    ):
        read(tmp_path, "tests")


def test_a_file_that_cannot_be_read_names_what_can(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("x")
    with pytest.raises(
        ConfigError, match=r"cannot read '\.txt' files; readable are \.jsonl, \.json, \.parquet, \.csv"
    ):
        read(tmp_path / "train.txt")


def test_a_limit_takes_the_first_rows_of_the_split(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS)
    source = Source(DatasetSpec(str(tmp_path), None, "train", limit=3))
    assert (source.num_rows, all_of(source)) == (3, ROWS[:3])
    assert Source(DatasetSpec(str(tmp_path), None, "train", limit=99)).num_rows == 7


def test_rows_come_in_the_order_they_are_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS)
    taken = Source(DatasetSpec(str(tmp_path), None, "train")).rows([5, 0, 5])
    assert [row["n"] for row in taken] == [5, 0, 5]


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS)
    assert len(read(tmp_path)) == 7
    write(tmp_path / "train.jsonl", ROWS[:4])
    assert len(read(tmp_path)) == 4


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_slices_of_one_file_are_apart_and_keep_the_files_row_numbers(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"problems.{suffix}"
    write(file, ROWS)
    train, held_out = (Source(DatasetSpec(str(file), None, split)) for split in ("train[:5]", "train[5:]"))
    assert all_of(train) + all_of(held_out) == ROWS
    assert held_out.row_numbers([0, 1]) == [5, 6]
    assert [row["n"] for row in read(file, "train[-1:]+train[:1]")] == [6, 0]


def test_splits_are_joined_and_sliced_by_name(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS[:4])
    write(tmp_path / "test.jsonl", ROWS[4:])
    source = Source(DatasetSpec(str(tmp_path), None, "test[:1]+train[50%:]"))
    assert [row["n"] for row in all_of(source)] == [4, 2, 3]
    assert len(set(source.row_numbers(range(3)))) == 3


def test_a_split_that_names_a_row_twice_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(ConfigError, match="names rows twice"):
        read(tmp_path, "train[:3]+train[2:]")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
@pytest.mark.parametrize("name", ["a*b", "a:b", "a[1]", "a?b c"])
def test_a_path_is_a_path_and_no_pattern(tmp_path: Path, suffix: str, name: str) -> None:
    write(tmp_path / name / f"train.{suffix}", ROWS)
    write(tmp_path / "aXb" / f"train.{suffix}", ROWS[:1])
    assert read(tmp_path / name) == ROWS
    assert read(tmp_path / name / f"train.{suffix}") == ROWS


def test_a_column_that_only_later_rows_have_is_found(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"q": "a"}] * 150
    write(tmp_path / "train.jsonl", [*rows, {"q": "b", "late": 1}])
    source = Source(DatasetSpec(str(tmp_path), None, "train"))
    assert source.columns() == ["q"]
    assert source.columns(["late"]) == ["q", "late"]


def test_a_number_of_32_bits_is_the_one_that_was_written(tmp_path: Path) -> None:
    table = pa.table({"a": pa.array([0.1, None], pa.float32())})
    pa.parquet.write_table(table, tmp_path / "train.parquet")
    assert read(tmp_path) == [{"a": 0.1}, {"a": None}]


def test_a_path_with_nothing_there_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("./gone.jsonl", "gone/", str(tmp_path / "gone*.jsonl")):
        with pytest.raises(ConfigError, match=r"no such file or folder; seen from /"):
            Source(DatasetSpec(path, None, "train"))


def test_a_table_that_is_none_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ConfigError, match=r"split 'train' cannot be read: "):
        read(tmp_path)


def test_the_order_is_the_seeds_and_every_row_is_in_it() -> None:
    order = row_order(100, shuffle=True, seed=4)
    assert sorted(order.tolist()) == list(range(100))
    assert np.array_equal(order, row_order(100, shuffle=True, seed=4))
    assert not np.array_equal(order, row_order(100, shuffle=True, seed=5))
    assert row_order(4, shuffle=False, seed=9).tolist() == [0, 1, 2, 3]


def test_rows_that_were_read_come_first_and_the_others_once_behind_them() -> None:
    order = np.array([3, 0, 4, 1, 2])
    # places 0 to 4 have the numbers 10 to 14
    numbers = np.arange(10, 15)
    read = np.array([13, 10])
    assert behind(order, numbers, read).tolist() == [3, 0, 4, 1, 2]
    # number 13 is gone, and 20 is new
    numbers = np.array([10, 11, 12, 14, 20])
    assert behind(order, numbers, read).tolist() == [-1, 0, 3, 4, 1, 2]
    assert behind(order, numbers, np.zeros(0, np.int64)).tolist() == order.tolist()
