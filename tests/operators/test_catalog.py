"""The catalogue names every operator, and says of one what its code says."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from trinity_operators.base import Mapper, OperatorSpecError
from trinity_operators.catalog import Argument, catalog, describe
from trinity_operators.data_juicer.signatures import surveyed
from trinity_operators.data_juicer.sources import data_juicer_files, read_source
from trinity_operators.registry import OPERATORS

OWN = '''
from typing import Annotated, Literal

import trinity_data
from pydantic import BaseModel, Field


@trinity_data.filter(reads=("prompt",), version="3")
def long_enough(row, min_words: Annotated[int, Field(ge=1)] = 5) -> bool:
    """Keeps long questions. And more."""
    return len(row["prompt"].split()) >= min_words


class Arguments(BaseModel):
    side: Literal["left", "right"]
    weight: float | None = None


class Bonus(trinity_data.Mapper):
    reads, writes, num_gpus, whole_groups = ("reward",), ("reward",), 0.5, True

    def __init__(self, args: Arguments) -> None: ...

    def map(self, rows):
        return {}
'''


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(OWN)
    return tmp_path


def test_the_catalogue_has_each_operator_once_with_its_kind_and_a_line() -> None:
    entries = catalog()
    by_name = {entry.name: entry for entry in entries}
    assert len(by_name) == len(entries)
    assert {*OPERATORS, *surveyed()} <= by_name.keys()
    assert [entry.name for entry in entries if not entry.summary] == []
    kinds = {name: by_name[name].kind for name in ("reward_filter", "grpo_advantage", "quality_score")}
    assert kinds == {"reward_filter": "filter", "grpo_advantage": "advantage", "quality_score": "mapper"}
    length = by_name["text_length_filter"]
    assert (length.kind, length.source) == ("filter", "Data-Juicer")
    assert length.summary == "Filter to keep samples with total text length within a specific range"


def test_a_function_is_described_by_its_decorator_and_its_signature(own: Path) -> None:
    described = describe("./mine.py:long_enough", own)
    assert (described.entry.kind, described.version, described.reads) == ("filter", "3", ("prompt",))
    assert described.entry.summary == "Keeps long questions"
    assert described.arguments == (Argument("min_words", "int", "5", "at least 1"),)


def test_a_class_is_described_with_the_fields_of_its_model_and_what_it_needs(own: Path) -> None:
    described = describe("./mine.py:Bonus", own)
    assert (described.entry.kind, described.reads, described.writes) == ("mapper", ("reward",), ("reward",))
    assert described.arguments == (
        Argument("side", "'left' | 'right'", "required", ""),
        Argument("weight", "float | None", "None", ""),
    )
    assert dict(described.declared) == {"num_gpus": 0.5, "whole_groups": True}


def test_columns_that_arguments_name_are_shown_by_the_argument() -> None:
    written = {name: describe(name, Path()).writes for name in ("judge_score", "rubric_score")}
    assert written == {
        "judge_score": ("<score>",),
        "rubric_score": ("<score>", "<score>_<name of a criterion>"),
    }
    # one that can be built without arguments shows what it writes then
    mappers = [name for name, kind in OPERATORS.items() if issubclass(kind, Mapper)]
    assert [name for name in mappers if not describe(name, Path()).writes] == []


def test_every_argument_of_a_built_in_operator_is_shown() -> None:
    for name, kind in OPERATORS.items():
        shown = [argument.name for argument in describe(name, Path()).arguments]
        parameters = inspect.signature(kind, eval_str=True).parameters
        model = parameters["args"].annotation if [*parameters] == ["args"] else None
        assert shown == [*(model.model_fields if model else parameters)], name


def test_the_source_of_a_data_juicer_operator_says_what_importing_it_would() -> None:
    source = read_source(data_juicer_files()["text_length_filter"])
    lower, upper = source.arguments
    assert (lower.name, lower.type, lower.default, upper.default) == ("min_len", "int", "10", "sys.maxsize")
    assert lower.meaning.startswith("The min text length in the filtering.")
    assert source.doc.startswith("Filter to keep samples")


def test_a_data_juicer_operator_has_the_arguments_that_it_inherits() -> None:
    names = [argument.name for argument in describe("llm_quality_score_filter", Path()).arguments]
    assert {"api_or_hf_model", "min_score", "input_keys"} <= set(names)


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(OperatorSpecError, match=r"did you mean 'reward_filter'"):
        describe("reward_filtr", Path())
