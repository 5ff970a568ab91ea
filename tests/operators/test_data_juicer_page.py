"""The page on Data-Juicer's operators lists those that are installed, as they were observed."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from data_juicer.ops import OPERATORS as THEIRS

from tests.operators.data_juicer_observation import media_of, observe
from trinity_operators.data_juicer.catalogue import MEANINGS, catalogue, page
from trinity_operators.data_juicer.loading import family_of
from trinity_operators.data_juicer.signatures import EXPANDERS, PACKAGE, _table

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "data_juicer.md"
OPERATORS = catalogue()["operators"]


def test_the_page_is_what_the_catalogue_says() -> None:
    assert PAGE.read_text() == page(catalogue()), "run `make data_juicer`"


def test_every_operator_of_the_installed_version_is_observed() -> None:
    assert catalogue()["version"] == version(PACKAGE)
    kinds = {name: family_of(kind).lower() for name, kind in THEIRS.modules.items()}
    assert {name: entry["kind"] for name, entry in OPERATORS.items()} == kinds
    assert {entry["status"] for entry in OPERATORS.values()} <= MEANINGS.keys()


def test_what_is_not_text_follows_from_the_code() -> None:
    media = {name for name, kind in THEIRS.modules.items() if media_of(name, kind)}
    assert {name for name, entry in OPERATORS.items() if entry["status"] == "media"} == media


def test_an_operator_whose_signature_is_known_can_be_built() -> None:
    declared = _table()[2].keys()
    assert not {OPERATORS[name]["status"] for name in declared} & {"package", "ray"}
    assert {OPERATORS[name]["kind"] for name in EXPANDERS} == {"mapper"}


@pytest.mark.slow
def test_each_operator_does_again_what_it_was_observed_to_do() -> None:
    assert observe() == catalogue()
