"""Forty broken pipeline files: each gets one line that says what is wrong and where, and nothing happens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trinity_data.cli.config import app
from trinity_data.config import load_pipeline_file
from trinity_data.errors import ConfigError

FILES = sorted((Path(__file__).parents[1] / "bad_pipelines").glob("*.yaml"))


def expected(file: Path) -> str:
    first = file.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# expect: ")
    return first.removeprefix("# expect: ")


def test_there_are_forty_numbered_files() -> None:
    assert [file.name[:3] for file in FILES] == [f"{number:02d}_" for number in range(1, 41)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_broken_file_gets_one_line(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_pipeline_file(file)
    message = str(caught.value)
    assert expected(file) in message
    assert message.startswith(f"{file}:")
    assert len(message.splitlines()) == 1
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_check_command_exits_2_and_writes_nothing(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["check", str(file)])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert expected(file) in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("stem", "repair"),
    [
        ("15_text_for_a_number", "buffer.batch_size=8"),
        ("20_learning_rate_below_zero", "algorithm.optimizer.lr=1e-4"),
        ("28_group_of_one", "algorithm.repeat_times=4"),
        ("33_name_taken", "buffer.explorer_input.eval_tasksets.0.name=other"),
        (
            "38_nothing_to_train_on",
            "stages.warmup.buffer.trainer_input.experience_buffer.path=synthetic://gsm8k",
        ),
    ],
)
def test_without_its_fault_a_file_can_be_run(stem: str, repair: str) -> None:
    file = next(file for file in FILES if file.stem == stem)
    assert load_pipeline_file(file, [repair]).stages


def test_a_process_of_its_own_prints_the_line_and_no_traceback(tmp_path: Path) -> None:
    program = "from trinity_data.cli.config import app; app()"
    command = [sys.executable, "-c", program, "check", str(FILES[9])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"{FILES[9]}:6: algorithm.repeat_time: unknown key; ")
    assert len(done.stderr.splitlines()) == 1


def test_the_check_command_says_what_a_good_file_would_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = Path(__file__).parents[2] / "pipelines" / "gsm8k_qwen.yaml"
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["check", str(good), "buffer.total_steps=7", "--elsewhere"])
    assert result.exit_code == 0
    said, note, execution = result.stdout.splitlines()
    assert said == f"{good}: can be run; quickstart/gsm8k_qwen: grpo (grpo, both, 7 steps)"
    assert note == f"{good}:19: buffer.total_epochs: has no effect: total_steps, 7, takes precedence"
    assert execution.startswith(
        "note: grpo: task operators run in process: no operator needs a worker of its own"
    )
    assert list(tmp_path.iterdir()) == []
