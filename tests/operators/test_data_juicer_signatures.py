"""What the survey says of Data-Juicer's operators is what building them shows."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from data_juicer.ops import OPERATORS as THEIRS

from trinity_data.errors import OperatorError
from trinity_operators.data_juicer.adapter import adapt
from trinity_operators.data_juicer.signatures import DATA_KEYS, RANGE_KEYS, DeclaredOperator, declared
from trinity_operators.data_juicer.survey import survey
from trinity_operators.registry import build_operator

TABLE: dict[str, Any] = json.loads(
    files("trinity_operators.data_juicer").joinpath("signatures.json").read_text()
)
VALUES = {"int": -7, "float": -7.5, "str": "(", "bool": True, "list": [7]}
"""Of each type one that a careful constructor would refuse."""


def value_of(kind: str) -> Any:
    if "List[str]" in kind:
        return ["("]
    if "Annotated[int" in kind:
        return 1
    return VALUES[kind.removeprefix("typing.Optional[").removesuffix("]")]


def test_the_table_is_that_of_the_data_juicer_installed() -> None:
    assert survey() == TABLE, "run `python -m trinity_operators.data_juicer.survey`"


def test_the_operators_of_plain_text_are_known() -> None:
    assert {
        "alphanumeric_filter",
        "character_repetition_filter",
        "special_characters_filter",
        "text_length_filter",
        "whitespace_normalization_mapper",
        "word_repetition_filter",
        "words_num_filter",
    } <= TABLE["operators"].keys()


@pytest.mark.parametrize("name", TABLE["operators"])
def test_what_is_declared_can_be_built_and_is_described_alike(name: str) -> None:
    entry = TABLE["operators"][name]
    given = {
        argument: value_of(each["type"]) if "type" in each else {"any": 1}
        for argument, each in entry["arguments"].items()
        if each.get("stored")
    }
    given |= dict.fromkeys(DATA_KEYS, "question")
    given |= dict.fromkeys(RANGE_KEYS if entry["family"] == "Filter" else (), True)
    declaration, built = declared(name, given), adapt(name, given)
    assert isinstance(declaration, DeclaredOperator)
    for attribute in (
        "name",
        "version",
        "reads",
        "writes",
        "writes_more",
        "whole_set",
        "pure",
        "calls_model",
    ):
        assert getattr(declaration, attribute) == getattr(built, attribute)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("text_length_filter", {"min_length": 3}),
        ("text_length_filter", {"min_len": "ten", "max_len": 1.5}),
        ("text_length_filter", {"num_proc": 4}),
        ("text_length_filter", {"reversed_rnge": True}),
        ("whitespace_normalization_mapper", {"reversed_range": True}),
        ("alphanumeric_filter", {"tokenization": "yes"}),
        ("clean_email_mapper", {"pattern": 3}),
    ],
)
def test_arguments_are_refused_in_the_same_words(name: str, args: dict[str, Any]) -> None:
    with pytest.raises(OperatorError) as declaration:
        declared(name, args)
    with pytest.raises(OperatorError) as built:
        adapt(name, args)
    assert str(declaration.value) == str(built.value)


@pytest.mark.parametrize(
    ("name", "args", "text"),
    [
        ("text_chunk_mapper", {"max_len": 10, "overlap_len": 20}, "overlap_len"),
        ("fix_unicode_mapper", {"normalization": "NFX"}, "NFX"),
        ("language_id_score_filter", {}, "fasttext"),
    ],
)
def test_what_only_building_tells_is_built(name: str, args: dict[str, Any], text: str) -> None:
    with pytest.raises(OperatorError) as declaration:
        build_operator(name, args, base_dir=Path(), declare=True)
    with pytest.raises(OperatorError) as built:
        build_operator(name, args, base_dir=Path())
    assert text in str(declaration.value)
    assert str(declaration.value) == str(built.value)


def test_an_argument_that_asks_for_a_model_is_left_to_building() -> None:
    assert declared("alphanumeric_filter", {"min_ratio": 0.5}) is not None
    assert declared("alphanumeric_filter", {"tokenization": True}) is None


def test_another_version_of_data_juicer_is_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinity_operators.data_juicer.signatures.version", lambda package: "1.6.2")
    assert declared("text_length_filter", {"min_len": "ten"}) is None


def test_no_operator_with_a_package_of_its_own_is_declared() -> None:
    assert (
        not {"clean_html_mapper", "language_id_score_filter", "token_num_filter"} & TABLE["operators"].keys()
    )
    assert TABLE["operators"].keys() < THEIRS.modules.keys()
