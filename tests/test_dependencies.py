"""What pyproject.toml declares is what the code imports, and the lock holds a version of each."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
OWN = {Path(package).name for package in PACKAGES}
FOR_DATA_JUICER = {"ftfy", "scipy"}
"""Data-Juicer imports them and does not declare them."""
OPTIONAL = {"polars"}
"""Asked for by a message where a call needs it and it is not installed."""
OF_MODULE = {"mlflow": "mlflow-skinny"}
"""The distribution of a module that may not be installed, where it has another name."""


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _names(requirements: list[str]) -> set[str]:
    return {_normal(re.split(r"[^\w.-]", requirement)[0]) for requirement in requirements}


def _modules(file: Path) -> Iterator[str]:
    """The modules that a file imports, by statement or by `import_module` with a literal."""
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(level=0, module=str(name)):
                yield name
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name))]):
                yield name


def _imported(folders: list[str], local: set[str]) -> dict[str, set[str]]:
    """The distributions that may provide each third-party module of the folders, by module."""
    files = (file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    modules = {name.split(".")[0] for file in files for name in _modules(file)}
    providers = packages_distributions()
    return {
        module: {_normal(name) for name in providers.get(module, [OF_MODULE.get(module, module)])}
        | {_normal(module)}
        for module in modules - set(sys.stdlib_module_names) - local
    }


DEPENDENCIES = _names(PROJECT["project"]["dependencies"])
EXTRAS = {name: _names(value) for name, value in PROJECT["project"]["optional-dependencies"].items()}


def test_every_import_of_the_packages_is_declared() -> None:
    declared = DEPENDENCIES | EXTRAS["vllm"] | EXTRAS["language"] | EXTRAS["mlflow"] | OPTIONAL
    imported = _imported(PACKAGES, OWN)
    assert len(imported) > 10
    assert [module for module, names in imported.items() if not names & declared] == []


def test_every_dependency_is_imported() -> None:
    imported = set[str]().union(*_imported(PACKAGES, OWN).values())
    assert DEPENDENCIES - imported == FOR_DATA_JUICER


def test_every_import_of_the_tests_is_declared() -> None:
    declared = DEPENDENCIES | EXTRAS["dev"] | EXTRAS["vllm"] | EXTRAS["mlflow"]
    beside = {file.stem for file in (ROOT / "tests").rglob("*.py")} | {"tests"}
    imported = _imported(["tests"], OWN | beside)
    assert [module for module, names in imported.items() if not names & declared] == []


@pytest.mark.parametrize("required", ["dependencies", "dev"])
def test_the_lock_has_a_version_of_every_dependency_and_no_address(required: str) -> None:
    text = (ROOT / "requirements" / "lock.txt").read_text()
    pins = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.!]+", pin) for pin in pins)
    locked = {_normal(pin.split("==")[0]) for pin in pins}
    assert (DEPENDENCIES if required == "dependencies" else EXTRAS["dev"]) - locked == set()
