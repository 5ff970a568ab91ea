"""Counts the files and the package crossings on a task's way from the task set to published weights.

docs/design.md lists the way as rows `| file | functions |` in the order of the calls. Every file and
function of the list must exist. Run it with `python tools/walk.py`.
"""

from __future__ import annotations

import ast
import re
import sys
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "trinity_data": "trinity_data",
    "trinity_operators": "operators/trinity_operators",
    "trinity_explorer": "explorer/trinity_explorer",
    "trinity_trainer": "trainer/trinity_trainer",
}
_ROW = re.compile(r"^\| `(?P<package>\w+)/(?P<file>[\w/]+\.py)` \| (?P<functions>.+) \|$", re.M)
_NAME = re.compile(r"`([\w.]+)`")


def steps(page: str) -> list[tuple[str, str, list[str]]]:
    """Package, file in it and functions of each row, in order. A file may occur more than once."""
    rows = _ROW.finditer(page)
    return [(row["package"], row["file"], _NAME.findall(row["functions"])) for row in rows]


def defined_names(file: Path) -> set[str]:
    """Functions, classes and `Class.method`s of a file."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
            names |= {f"{node.name}.{method.name}" for method in methods}
    return names


def missing(way: list[tuple[str, str, list[str]]]) -> list[str]:
    """What the list names and the code does not have."""
    problems = []
    for package, name, functions in way:
        file = ROOT / FOLDERS[package] / name
        if not file.is_file():
            problems.append(f"{package}/{name}")
            continue
        problems += [f"{package}/{name}: {each}" for each in functions if each not in defined_names(file)]
    return problems


def count(way: list[tuple[str, str, list[str]]]) -> tuple[int, int]:
    """Different files, and how often a step lies in another package than the step before."""
    packages = [package for package, _, _ in way]
    crossings = sum(one != other for one, other in pairwise(packages))
    return len({(package, file) for package, file, _ in way}), crossings


if __name__ == "__main__":
    way = steps((ROOT / "docs" / "design.md").read_text())
    files, crossings = count(way)
    print(f"{len(way)} steps through {files} files, {crossings} crossings between packages")
    if problems := missing(way):
        sys.exit("not in the code: " + ", ".join(problems))
