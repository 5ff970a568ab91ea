"""`trinity-data retain`: what a person types and reads."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trinity_data.cli.main import cli
from trinity_data.store.retention import CONTENTS
from trinity_data.store.snapshot import at_step
from trinity_data.store.store import Store
from trinity_data.store.tags import TAGS_FOLDER, tag

FIRST = "explorer/grpo/0000001/00000/001/00"


@pytest.fixture
def run(small_run: Path, tmp_path: Path) -> Path:
    """The small run, sealed, with the folder of its checkpoint and without its tag."""
    shutil.copytree(small_run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "store" / TAGS_FOLDER)
    (tmp_path / "run" / "global_step_1").mkdir()
    store = Store.create_or_open(tmp_path / "run" / "store")
    store.seal()
    store.close()
    return tmp_path / "run"


def invoke(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_a_dry_run_says_what_would_go_and_what_stays(run: Path) -> None:
    out = invoke("retain", run, "--max-size", "10B", "--dry-run", code=1)
    assert "would expire the contents of 4 experiences in 1 file(s), at most " in out
    assert "kept 1 file(s)" in out and "each has rows of batches after the newest checkpoint" in out
    assert "the store is still larger than 10B: nothing else may go" in out
    assert "expired" not in invoke("audit", run)


def test_what_went_is_reported_by_retain_why_and_audit(run: Path) -> None:
    out = invoke("retain", run, "--max-size", "10B", code=1)
    assert "expired the contents of 4 experiences in 1 file(s), " in out
    assert "of these, the contents of 4 rows were expired (" in invoke("audit", run)
    why = invoke("why", run, FIRST)
    assert f"experience {FIRST}: trained in step 1\nits tokens, log-probs and texts were expired at 20" in why
    assert "raw reward 1 (accuracy 1)" in why and "of the loss 0.25" in why
    assert "expired" not in invoke("why", run, FIRST.replace("0000001", "0000002"))
    assert invoke("sql", run, "SELECT count(*), count(token_ids) FROM rollouts", "--format", "csv").split()[
        -1
    ] == ("6,2")


def test_a_size_that_fits_is_reached(run: Path) -> None:
    assert "expired the contents of 0 experiences" in invoke("retain", run, "--max-size", "1.5 GB")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "say what may go"),
        (["--older-than", "30"], "such as 30d"),
        (["--older-than", "3 months"], "such as 30d"),
        (["--max-size", "many"], "such as 10GB"),
    ],
)
def test_what_is_not_understood_is_refused(run: Path, arguments: list[str], words: str) -> None:
    assert words in " ".join(invoke("retain", run, *arguments, code=2).replace("│", " ").split())


def test_the_page_is_true(run: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "retention.md").read_text()
    tag(run / "store", "best", at_step(run / "store", 1))
    commands = re.findall(r"^\$ trinity-data (retain .+)$", page, re.MULTILINE)
    for command in commands:
        assert "the contents of 0 experiences" in invoke(*command.replace("gsm8k/rft", str(run)).split())
    options = set(re.findall(r"^\| `(--[a-z-]+)` \|", page, re.MULTILINE))
    assert options == {"--older-than", "--max-size", "--keep-tag", "--dry-run"}
    assert len(commands) == 3 and all(f"`{column}`" in page for column in CONTENTS)
    (block,) = re.findall(r"```python\n(.+?)```", page, re.DOTALL)
    exec(block.replace("checkpoints/gsm8k/rft", str(run)), {})
