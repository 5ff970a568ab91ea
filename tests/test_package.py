"""What an installed package gives: its version, its types, its licence, a command that comes up at once."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
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


def test_every_public_name_resolves_and_is_in_all() -> None:
    public = {name for name in dir(trinity_data) if not name.startswith("_") and _is_ours(name)}
    assert public | {"__version__"} == set(trinity_data.__all__)
    assert len(trinity_data.__all__) == len(set(trinity_data.__all__))


def _is_ours(name: str) -> bool:
    """Whether it is no submodule, and nothing that the module only imports for itself."""
    value = getattr(trinity_data, name)
    return not isinstance(value, ModuleType) and name not in IMPORTED


IMPORTED = {"Mapping", "import_module", "version", "Path", "TYPE_CHECKING", "Any", "annotations"}
WITHOUT_DOCSTRING = {"__version__", "Column"}
"""Text, and an alias of a type."""


def test_every_public_name_has_a_docstring_of_its_own() -> None:
    missing = [
        name
        for name in sorted(set(trinity_data.__all__) - WITHOUT_DOCSTRING)
        if not vars(getattr(trinity_data, name)).get("__doc__", getattr(trinity_data, name).__doc__)
    ]
    assert missing == []


def test_type_checkers_see_every_public_name_where_it_is_loaded_from() -> None:
    """What the module imports for type checkers is what it loads at run time."""
    tree = ast.parse(Path(str(trinity_data.__file__)).read_text())
    (block,) = (n for n in tree.body if isinstance(n, ast.If) and isinstance(n.test, ast.Name))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert {alias.name: node.module for node in imports for alias in node.names} == trinity_data._MODULES


def test_importing_the_package_loads_nothing_but_the_standard_library() -> None:
    program = """
import sys
before = set(sys.modules)
import trinity_data
names = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(names - set(sys.stdlib_module_names)), [n for n in sys.modules if n.startswith("trinity_")])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "['trinity_data'] ['trinity_data']\n"


def test_a_process_of_a_workflow_gets_its_names_without_torch_ray_and_the_configuration() -> None:
    program = """
import sys
from trinity_data import ChatModel, Reply, Reward, RolloutError, Task, Workflow
print(sorted({"torch", "ray", "pydantic", "transformers"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_pipeline_that_cannot_be_run_is_a_config_error_with_every_problem() -> None:
    with pytest.raises(trinity_data.ConfigError) as raised:
        trinity_data.run({"project": "p", "name": "n", "modle": {}, "buffer": {"batch_size": -1}})
    text = str(raised.value)
    assert "<dict>: modle" in text and "<dict>: buffer.batch_size" in text


def test_a_dict_that_yaml_cannot_hold_is_a_config_error() -> None:
    with pytest.raises(trinity_data.ConfigError, match="<dict>: cannot be written as YAML"):
        trinity_data.run({"project": object()})


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
