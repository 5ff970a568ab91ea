"""A task's way from the task set to published weights, as docs/design.md lists it, is in the code."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]
WALK = runpy.run_path(str(ROOT / "tools" / "walk.py"))
PAGE = (ROOT / "docs" / "design.md").read_text()


def test_every_file_and_function_of_the_way_exists() -> None:
    way = WALK["steps"](PAGE)
    assert len(way) > 30
    assert WALK["missing"](way) == []


def test_the_numbers_of_the_page_are_those_of_its_list() -> None:
    (stated,) = re.findall(r"counts: (\d+) files, (\d+) crossings", PAGE)
    assert WALK["count"](WALK["steps"](PAGE)) == tuple(map(int, stated))
