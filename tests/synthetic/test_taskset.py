from __future__ import annotations

import json
import random
import re
import threading
from pathlib import Path

import pytest
from datasets import load_dataset

from trinity_data.errors import ConfigError
from trinity_data.synthetic.taskset import NAMES, THINGS, Problem, split_triples, write_taskset


def read_split(folder: Path, split: str) -> list[Problem]:
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]


def number_annotations(problem: Problem) -> int:
    return problem["answer"].count("<<")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_taskset(tmp_path_factory.mktemp("tasks") / "gsm8k", seed=0, num_train=1200, num_test=200)


def test_each_split_has_the_number_of_problems_asked_for(folder: Path) -> None:
    assert len(read_split(folder, "train")) == 1200
    assert len(read_split(folder, "test")) == 200


def test_every_annotation_is_true_and_the_last_one_is_the_answer(folder: Path) -> None:
    for problem in read_split(folder, "train") + read_split(folder, "test"):
        sums = re.findall(r"(\d+)([+-])(\d+)=<<(\d+)([+-])(\d+)=(\d+)>>(\d+)", problem["answer"])
        assert sums
        for a, operation, b, a_again, operation_again, b_again, result, result_again in sums:
            assert (a, operation, b) == (a_again, operation_again, b_again)
            assert result == result_again
            assert int(result) == (int(a) + int(b) if operation == "+" else int(a) - int(b))
        assert problem["answer"].splitlines()[-1] == f"#### {sums[-1][6]}"


def test_the_numbers_of_a_problem_are_those_of_its_solution(folder: Path) -> None:
    for problem in read_split(folder, "test"):
        a, b = re.findall(r"\d+", problem["question"])
        first = re.search(r"<<(\d+)[+-](\d+)=", problem["answer"])
        assert first and first.groups() == (a, b)


def without_words(question: str) -> str:
    """A question with its names and things replaced: its template and numbers are left."""
    return re.sub(rf"\b({'|'.join([*NAMES, *NAMES.values(), *THINGS])})\b", "_", re.sub(" +", " ", question))


def test_no_test_problem_is_a_train_problem_with_other_words(folder: Path) -> None:
    train = {without_words(p["question"]) for p in read_split(folder, "train")}
    test = {without_words(p["question"]) for p in read_split(folder, "test")}
    # fewer than the problems: the same questions do come with other words within a split
    assert len(test) < 200 and len(train) < 1200
    assert not train & test


def test_every_problem_with_a_result_of_at_least_one_is_in_exactly_one_split() -> None:
    train, test = split_triples(random.Random(0))
    # 12 templates add 1 to 9 to 1 to 9, 12 subtract a smaller number from 2 to 9
    assert len(train) + len(test) == len({*train, *test}) == 12 * 81 + 12 * 36
    assert len(test) == round(0.15 * 1404)


def test_test_problems_are_plain_and_distinct(folder: Path) -> None:
    problems = read_split(folder, "test")
    assert {number_annotations(p) for p in problems} == {1}
    assert len({p["question"] for p in problems}) == 200
    assert max(len(p["question"]) for p in problems) < 120


def test_one_train_problem_in_twelve_is_odd_in_one_of_four_ways(folder: Path) -> None:
    problems = read_split(folder, "train")
    white_space = [p for p in problems if "  " in p["question"]]
    once = {re.sub(" +", " ", p["question"]) for p in white_space}
    assert sum(number_annotations(p) == 3 for p in problems) == 25
    assert sum(len(p["question"]) < 15 for p in problems) == 25
    assert sum(len(p["question"]) > 200 for p in problems) == 25
    assert len(white_space) == 25
    assert once <= {p["question"] for p in problems}


def test_a_seed_gives_the_same_bytes_and_another_seed_others(folder: Path, tmp_path: Path) -> None:
    same = write_taskset(tmp_path / "same", seed=0, num_train=1200, num_test=200)
    other = write_taskset(tmp_path / "other", seed=1, num_train=1200, num_test=200)
    for split in ("train.jsonl", "test.jsonl"):
        assert (same / split).read_bytes() == (folder / split).read_bytes()
        assert (other / split).read_bytes() != (folder / split).read_bytes()


def test_datasets_reads_the_folder(folder: Path, tmp_path: Path) -> None:
    loaded = load_dataset(str(folder), split="test", cache_dir=str(tmp_path))
    assert loaded.column_names == ["question", "answer"]
    assert list(loaded) == read_split(folder, "test")


def test_a_complete_folder_is_used_again(tmp_path: Path) -> None:
    folder = write_taskset(tmp_path / "tasks", seed=3, num_train=24, num_test=8)
    before = (folder / "train.jsonl").stat()
    assert write_taskset(tmp_path / "tasks", seed=3, num_train=24, num_test=8) == folder
    assert (folder / "train.jsonl").stat() == before


def test_a_folder_of_other_parameters_is_refused(tmp_path: Path) -> None:
    write_taskset(tmp_path / "tasks", seed=3, num_train=24, num_test=8)
    with pytest.raises(
        ConfigError, match=r"tasks holds what was made from .*'seed': 3.*asked for is .*'seed': 4"
    ):
        write_taskset(tmp_path / "tasks", seed=4, num_train=24, num_test=8)


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match="not made by this program"):
        write_taskset(tmp_path, seed=0, num_train=24, num_test=8)
    assert (tmp_path / "train.jsonl").read_text() == "mine"


def test_writers_at_the_same_time_leave_one_whole_folder(tmp_path: Path) -> None:
    target = tmp_path / "tasks"
    writers = [
        threading.Thread(
            target=write_taskset, args=(target,), kwargs={"seed": 0, "num_train": 600, "num_test": 60}
        )
        for _ in range(4)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [path.name for path in tmp_path.iterdir()] == ["tasks"]
    assert len(read_split(target, "train")) == 600


@pytest.mark.parametrize("counts", [{"num_train": 0}, {"num_test": -1}, {"num_train": 50_001}])
def test_impossible_counts_are_refused(tmp_path: Path, counts: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="allowed is 1 to 50000"):
        write_taskset(tmp_path / "tasks", seed=0, **counts)
