"""Operators that make several rows of one or none, that need the whole set, and that add columns:
rows, ids and decisions worked out by hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from trinity_data.config import FormatConfig, TasksetConfig
from trinity_data.dataset.task import build_task_rows, tasks_from_table
from trinity_data.errors import OperatorError
from trinity_operators.base import (
    Column,
    Expander,
    Expansion,
    Filter,
    FilterResult,
    Mapper,
    MapperResult,
    Operator,
)
from trinity_operators.result import Result
from trinity_operators.runner import run_operators
from trinity_operators.task_filtering import (
    FilteredTasks,
    chunk_bounds,
    filter_tasks,
    for_evaluation,
    needs_whole_set,
)


class Split(Expander):
    """A row for every part between `|`; none for an empty text."""

    name = "split"
    reads = ("prompt",)
    writes = ("prompt",)

    def expand(self, rows: pa.Table) -> Expansion:
        parts = [text.split("|") if text else [] for text in rows["prompt"].to_pylist()]
        parents = [number for number, texts in enumerate(parts) for _ in texts]
        texts = [text for texts in parts for text in texts]
        return Expansion(parents, {"prompt": texts}, {"of": [len(parts[row]) for row in parents]}, "empty")


class Length(Mapper):
    name = "length"
    writes = ("length",)

    def map(self, rows: pa.Table) -> Mapping[str, Column]:
        return {"length": [len(text) for text in rows["prompt"].to_pylist()]}


class Longer(Filter):
    name = "longer"

    def __init__(self, than: int) -> None:
        self.than = than

    def apply(self, rows: pa.Table) -> FilterResult:
        lengths = np.array([len(text) for text in rows["prompt"].to_pylist()])
        return FilterResult(lengths > self.than, "short", lengths)


class Says(Expander):
    def __init__(self, parents: Sequence[int]) -> None:
        self.parents = parents

    def expand(self, rows: pa.Table) -> Expansion:
        return Expansion(self.parents, {})


class AddsTags(Mapper):
    """A column that holds no numbers, and rows of which it can say nothing."""

    def __init__(self, name: str = "tags") -> None:
        self.column = name

    def map(self, rows: pa.Table) -> MapperResult:
        texts = rows["prompt"].to_pylist()
        tags = [text.split() or None for text in texts]
        return MapperResult({}, {self.column: tags}, ["" if text else "no text" for text in texts])


class Tagged(Filter):
    reads = ("tags",)

    def apply(self, rows: pa.Table) -> FilterResult:
        kept = np.array(["b" in (tags or ()) for tags in rows["tags"].to_pylist()])
        return FilterResult(kept, "no b", added={"seen": [str(value) for value in kept]})


def run(prompts: list[str], *operators: Operator, row_kind: str = "task") -> Result:
    rows = pa.table({f"{row_kind}_id": [f"t{i}" for i in range(len(prompts))], "prompt": prompts})
    kinds: dict[str, Any] = {"row_kind": row_kind, "id_column": f"{row_kind}_id"}
    return run_operators(operators, rows, stage="rl", step=None, **kinds)


def tasks(prompts: list[str], *operators: Operator) -> FilteredTasks:
    config = TasksetConfig(
        name="sums", path="x", format=FormatConfig(), default_workflow_type="math_workflow"
    )
    rows = [{"prompt": prompt, "response": str(number)} for number, prompt in enumerate(prompts)]
    numbers = list(range(len(rows)))
    built = build_task_rows(config, rows, stage="rl", source="data", source_rows=numbers, first_position=10)
    return filter_tasks(operators, built, stage="rl")


def test_a_row_becomes_several_rows_in_its_place() -> None:
    result = run(["a|bb", "c", "", "d|e|f"], Length(), Split(), Length())
    assert result.survivors["task_id"].to_pylist() == ["t0/1", "t0/2", "t1", "t3/1", "t3/2", "t3/3"]
    assert result.survivors["prompt"].to_pylist() == ["a", "bb", "c", "d", "e", "f"]
    assert result.survivors["of"].to_pylist() == [2, 2, 1, 3, 3, 3]
    assert result.ids.to_pylist() == ["t0", "t1", "t2", "t3", "t0/1", "t0/2", "t3/1", "t3/2", "t3/3"]
    assert result.parents.tolist() == [0, 0, 3, 3, 3]
    assert result.kept.tolist() == [False, True, False, False, True, True, True, True, True]
    assert result.dropped_by.to_pylist() == ["split", "", "split", "split", "", "", "", "", ""]
    assert result.values["length"].tolist() == [4, 1, 0, 5, 1, 2, 1, 1, 1]


def test_the_decisions_count_what_a_row_became() -> None:
    decisions = run(["a|bb", "c", "", "d|e|f"], Split(), Longer(1)).decisions
    rows = decisions.select(["operator", "row_id", "kept", "reason", "value_before", "value_after"])
    assert [tuple(row.values()) for row in rows.to_pylist()] == [
        ("split", "t0", False, "becomes 2 rows", 1.0, 2.0),
        ("split", "t1", True, "", 1.0, 1.0),
        ("split", "t2", False, "empty", 1.0, 0.0),
        ("split", "t3", False, "becomes 3 rows", 1.0, 3.0),
        ("longer", "t0/1", False, "short", 1.0, 1.0),
        ("longer", "t0/2", True, "", 2.0, 2.0),
        ("longer", "t1", False, "short", 1.0, 1.0),
        ("longer", "t3/1", False, "short", 1.0, 1.0),
        ("longer", "t3/2", False, "short", 1.0, 1.0),
        ("longer", "t3/3", False, "short", 1.0, 1.0),
    ]


def test_rows_that_were_made_can_become_several_again() -> None:
    class Halves(Split):
        def expand(self, rows: pa.Table) -> Expansion:
            texts = rows["prompt"].to_pylist()
            parts = [[text[:1], text[1:]] if len(text) > 1 else [text] for text in texts]
            parents = [number for number, halves in enumerate(parts) for _ in halves]
            return Expansion(parents, {"prompt": [half for halves in parts for half in halves]})

    result = run(["ab|c"], Split(), Halves())
    assert result.survivors["task_id"].to_pylist() == ["t0/1/1", "t0/1/2", "t0/2"]
    assert result.ids.to_pylist() == ["t0", "t0/1", "t0/2", "t0/1/1", "t0/1/2"]
    assert result.parents.tolist() == [0, 0, 1, 1]
    assert result.dropped_by.to_pylist() == ["split", "Halves", "", "", ""]


def test_a_task_that_becomes_several_is_the_parent_of_each() -> None:
    found = tasks(["one|two", "three"], Split(), Longer(3))
    rows = found.tasks.to_pylist()
    assert [(row["prompt"], row["kept"], row["dropped_by"]) for row in rows] == [
        ("one|two", False, "split"),
        ("one", False, "longer"),
        ("two", False, "longer"),
        ("three", True, ""),
    ]
    whole, one, two, three = (row["task_id"] for row in rows)
    assert len({whole, one, two, three}) == 4
    assert [row["parent"] for row in rows] == [None, whole, whole, None]
    assert [row["position"] for row in rows] == [10, 10, 10, 11]
    assert [row["messages"][-1]["content"] for row in rows] == ["one|two", "one", "two", "three"]
    decided = [(row["operator"], row["row_id"]) for row in found.decisions.to_pylist()]
    assert decided == [("split", whole), ("split", three)] + [("longer", row) for row in (one, two, three)]


def test_equal_rows_of_one_task_are_different_tasks() -> None:
    rows = tasks(["same|same"], Split()).tasks.to_pylist()
    assert [row["prompt"] for row in rows] == ["same|same", "same", "same"]
    assert len({row["task_id"] for row in rows}) == 3


def test_the_same_set_gives_the_same_ids_again() -> None:
    first, second = tasks(["a|b", "c"], Split()).tasks, tasks(["a|b", "c"], Split()).tasks
    assert first.equals(second)


def test_a_made_row_without_a_prompt_is_dropped_on_record() -> None:
    found = tasks(["one|"], Split())
    assert found.tasks["dropped_by"].to_pylist() == ["split", "", "trainable"]
    assert "the operators left an empty prompt" in found.decisions["reason"].to_pylist()


def test_added_columns_are_read_by_later_operators_and_kept_by_the_task() -> None:
    found = tasks(["a b", "c"], AddsTags(), Tagged())
    assert found.tasks["kept"].to_pylist() == [True, False]
    (task,) = tasks_from_table(found.tasks.filter(found.tasks["kept"]))
    assert (task.columns["tags"], task.columns["seen"]) == (["a", "b"], "True")
    assert "tags" not in json.loads(found.tasks["columns"].to_pylist()[1])


def test_what_a_mapper_cannot_do_is_the_reason_of_a_row_that_stays() -> None:
    result = run(["a b", ""], AddsTags())
    assert result.kept.tolist() == [True, True]
    assert result.decisions["reason"].to_pylist() == ["", "no text"]


@pytest.mark.parametrize(
    ("operator", "message"),
    [
        (Says([0, 2]), "parents must be numbers of rows below 2, in ascending order"),
        (Says([1, 0]), "in ascending order"),
        (AddsTags("prompt"), "'AddsTags' adds the column 'prompt', which is there and of another kind"),
        (AddsTags("answer"), "adds the column 'answer'"),
    ],
)
def test_what_does_not_fit_the_rows_is_refused(operator: Operator, message: str) -> None:
    with pytest.raises(OperatorError, match=message):
        run(["a", "b"], operator)


def test_an_experience_stays_one_row() -> None:
    with pytest.raises(OperatorError, match=r"^operators\[1\]: 'split' makes several rows of one; "):
        run(["a"], Length(), Split(), row_kind="experience")


def test_one_operator_of_the_whole_set_makes_one_chunk() -> None:
    class Best(Longer):
        whole_set = True

    assert not needs_whole_set([Length()])
    assert needs_whole_set([Length(), Best(1)])
    assert list(chunk_bounds(0, 130)) == [(0, 64), (64, 128), (128, 130)]
    assert list(chunk_bounds(0, 130, whole_set=True)) == [(0, 130)]
    assert list(chunk_bounds(130, 130, whole_set=True)) == []


def test_an_evaluation_set_is_not_divided() -> None:
    assert [operator.label for operator in for_evaluation([Length(), Split()])] == ["length"]
