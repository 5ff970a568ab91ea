"""docs/reference/store.md: its program runs, and says what the page says of states."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from trinity_data.store.types import State

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "store.md").read_text()


def test_the_program_of_the_page_stores_two_rows_and_trains_one(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "'trained': 1, 'dropped': 1" in done.stdout


def test_the_page_names_every_state() -> None:
    assert all(f"`{state}`" in PAGE for state in State)


def test_the_files_that_the_page_points_to_are_there() -> None:
    names = re.findall(r"`(?:tests/store/)?(test_\w+\.py)`", PAGE)
    assert names
    for name in names:
        assert (Path(__file__).parent / name).is_file()
