from __future__ import annotations

import random

import pytest
from datasets import ReadInstruction

from trinity_data.dataset.files import split_parts
from trinity_data.errors import ConfigError


@pytest.mark.parametrize(
    "split",
    ["train", "train[:10]", "train[3:]", "train[-5:]", "train[:-5]", "train[10%:20%]", "train[10:20%]",
     "train[:33%]", "train[-7%:]", "train[5:2]", "train[:10]+train[90%:]"],
)  # fmt: skip
def test_a_split_names_the_rows_that_datasets_reads(split: str) -> None:
    draw = random.Random(0)
    for num_rows in [10, 97, 100, *(draw.randrange(10, 10_000) for _ in range(30))]:
        theirs = ReadInstruction.from_spec(split).to_absolute({"train": num_rows})
        ours = [part.bounds(num_rows) for part in split_parts(split)]
        assert [range(*each) for each in ours] == [range(each.from_, each.to) for each in theirs], num_rows


def test_a_slice_may_end_behind_the_last_row() -> None:
    (part,) = split_parts("train[5:100]")
    assert part.bounds(20) == (5, 20)


@pytest.mark.parametrize(
    "split", ["train[:10", "train[10]", "train[a:b]", "train[:10] test", "train[:200%]", "+train"]
)
def test_what_is_no_split_is_refused_with_examples(split: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed: train, train\[:100\]"):
        split_parts(split)
