"""What README promises can be done: its commands exist, its files are there,
and what it asks a run is answered.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trinity_data.cli.main import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = [line.split("  #")[0] for line in re.findall(r"^\$ (trinity-data .+)$", README, re.MULTILINE)]


def of(verb: str) -> list[str]:
    return [command for command in COMMANDS if command.split()[1] == verb]


def invoke(arguments: list[str]) -> str:
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_readme_names_a_command_without_endything_it_says() -> None:
    assert {command.split()[1] for command in COMMANDS} == {
        "run",
        "runs",
        "sql",
        "why",
        "audit",
        "export",
        "config",
    }


@pytest.mark.parametrize("command", [*of("run"), *of("config")])
def test_every_pipeline_file_of_the_readme_is_sound(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    file, *overrides = shlex.split(command)[-1:] if "check" in command else shlex.split(command)[2:]
    assert "can be run" in invoke(["config", "check", "--elsewhere", file, *overrides])


@pytest.mark.parametrize("command", [*of("sql"), *of("audit"), *of("runs"), *of("export"), *of("why")])
def test_every_question_of_the_readme_is_answered(
    command: str, small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(small_run.parents[1]))
    monkeypatch.chdir(tmp_path)
    # the run of the tests stands for the reader's own
    asked = command.replace("gsm8k/rft", "tests/small").replace(
        "grpo/0000101/00000/000", "grpo/0000001/00000/000"
    )
    # whose rows have no text, so they make no pairs
    asked = asked.replace(" dpo ", " raw ")
    assert invoke(shlex.split(asked)[1:])


def test_the_folders_of_the_readme_are_there() -> None:
    folders = re.findall(r"^\| `([a-z_]+)/`", README, re.MULTILINE)
    assert folders
    for folder in folders:
        assert (ROOT / folder).is_dir()


def test_the_make_targets_of_the_readme_are_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"`?make ([a-z]+)", README))
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
