"""The commands of docs/howto/export.md, branch.md and whatif.md run, in their order, on a small run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trinity_data.cli.main import cli
from trinity_data.config import RunConfig

DOCS = Path(__file__).parents[2] / "docs" / "howto"


def commands(page: str) -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)
    return [words for block in blocks for words in split(block)]


def split(block: str) -> list[list[str]]:
    """Commands of a block; a quoted argument may go over several lines."""
    calls: list[list[str]] = []
    for line in re.split(r"\n(?=trinity-data )", block):
        name, *words = shlex.split(line)
        assert name == "trinity-data"
        calls.append(words)
    return calls


@pytest.fixture
def here(
    tmp_path: Path, run: Path, pipeline: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder with what the pages speak of: a run, a changed pipeline file, rollouts made elsewhere."""
    shutil.copytree(run, tmp_path / "checkpoints" / "gsm8k" / "rft")
    changed = pipeline("[{name: reward_filter, args: {threshold: 0.5}}]")
    shutil.copy(changed.file, tmp_path / "new.yaml")
    solved = [{"is_correct": right, "solution": f"it is {right}"} for right in (True, False)]
    record = {"question": "1+1?", "ground_truth": "2", "small": solved[1], "large": solved[0]}
    (tmp_path / "solutions.jsonl").write_text(json.dumps(record) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize("page", ["export.md", "branch.md", "whatif.md"])
def test_the_commands_of_the_page_run(here: Path, page: str) -> None:
    printed = []
    for words in commands(page):
        called = CliRunner().invoke(cli, words)
        assert called.exit_code == 0, f"{shlex.join(words)}\n{called.output}\n{called.exception}"
        printed.append(called.output)
    assert len(printed) >= 4
    if page == "whatif.md":
        shown = re.search(r"```\n(stage .*?)```", (DOCS / page).read_text(), flags=re.DOTALL)
        assert shown is not None and printed[0] == shown[1]


def test_the_python_of_the_page_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    called = CliRunner().invoke(cli, ["export", "checkpoints/gsm8k/rft", "dpo", "--to", "pairs"])
    assert called.exit_code == 0, called.output
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / "export.md").read_text(), flags=re.DOTALL)
    exec(compile(block, "export.md", "exec"), {})
    assert capsys.readouterr().out.strip() == block.rstrip().rpartition("# ")[2]
