"""What an installed package gives: its version, its types, its licence, a command that comes up at once."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import trinity_data
from trinity_data.cli.main import cli
from trinity_data.schema import SCHEMA_VERSION
from trinity_data.store.ledger import FORMAT

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_the_one_of_pyproject(pyproject: dict[str, Any]) -> None:
    assert trinity_data.__version__ == pyproject["project"]["version"]


def test_an_attribute_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'trinity_data' has no attribute 'opne'"):
        trinity_data.opne  # noqa: B018


def test_the_public_names_can_all_be_read() -> None:
    assert trinity_data.__all__ == ["__version__", "open"]
    assert all(getattr(trinity_data, name) for name in trinity_data.__all__)


def test_the_command_prints_the_version_and_leaves() -> None:
    done = CliRunner().invoke(cli, ["--version", "no-such-command"])
    assert (done.exit_code, done.output) == (0, f"trinity-data {trinity_data.__version__}\n")


def test_the_command_offers_completion_for_the_shell() -> None:
    assert "--install-completion" in CliRunner().invoke(cli, ["--help"]).output


def test_every_package_of_the_wheel_says_that_it_is_typed(pyproject: dict[str, Any]) -> None:
    packages = pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert len(packages) == 4
    for package in packages:
        assert (ROOT / package / "py.typed").is_file(), package


def test_the_licence_is_there_in_full(pyproject: dict[str, Any]) -> None:
    assert pyproject["project"]["license"] == "Apache-2.0"
    (name,) = pyproject["project"]["license-files"]
    text = (ROOT / name).read_text()
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_changelog_names_the_versions_of_the_formats() -> None:
    text = " ".join((ROOT / "CHANGELOG.md").read_text().split())
    assert f"rows have schema version {SCHEMA_VERSION} " in text
    assert f"the ledger has version {FORMAT} " in text


def test_the_files_and_targets_of_contributing_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    files = re.findall(r"`([\w.-]+/[\w./-]*|[\w-]*\.\w+)`", text)
    assert len(files) > 20
    assert [file for file in files if not (ROOT / file).exists()] == []
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z]+)`", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
