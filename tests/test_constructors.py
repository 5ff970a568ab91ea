"""Constructors that a reader can call without a second look."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "trinity_data",
    "operators/trinity_operators",
    "explorer/trinity_explorer",
    "trainer/trinity_trainer",
)
MOST = 8


def test_no_constructor_takes_more_than_eight_arguments() -> None:
    counts = {
        f"{file.relative_to(ROOT)}:{node.lineno}": len(node.args.args) + len(node.args.kwonlyargs) - 1
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    }
    assert len(counts) > 100
    assert {place: count for place, count in counts.items() if count > MOST} == {}
