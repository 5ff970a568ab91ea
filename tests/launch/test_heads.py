"""The beginning of a data file is read once for all checks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.small_pipelines import EXPLORING
from trinity_data.launch.heads import forget_heads, head_of

PIPELINE = EXPLORING.replace("synthetic://gsm8k", "tasks.csv")
PROGRAM = """
import sys
from pathlib import Path
from trinity_data.launch.check import load_checked

times = []

def count(event, args):
    if event == "open" and str(args[0]).endswith("tasks.csv"):
        times.append(1)

sys.addaudithook(count)
load_checked(Path("pipeline.yaml"))
print(len(times))
"""


def test_a_check_reads_the_beginning_of_a_task_set_once(tmp_path: Path) -> None:
    (tmp_path / "pipeline.yaml").write_text(PIPELINE)
    (tmp_path / "tasks.csv").write_text("question,answer\n2 + 3?,5\n")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "1"


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "tasks.csv"
    file.write_text("question\nfirst\n")
    assert head_of(file) == (["question"], [{"question": "first"}])
    file.write_text("question\nanother one\n")
    assert head_of(file) == (["question"], [{"question": "another one"}])
    forget_heads()
