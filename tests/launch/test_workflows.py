"""What is found wrong with the workflows of a pipeline file, and where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trinity_data.config import load_pipeline_file
from trinity_data.launch.workflows import notes_about_code, workflow_diagnostics
from trinity_explorer.rewards.run_code import PROTECTIONS, run_code

FAKE = Path(__file__).parent / "fake.yaml"
TASKSET = "buffer.explorer_input.taskset"

Found = Callable[..., list[str]]


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Found:
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))

    def found(*overrides: str) -> list[str]:
        keys = [f"{TASKSET}.{each}" for each in overrides]
        # operators may write columns of their own, so a task set's are known only without them
        config = load_pipeline_file(FAKE, [*keys, "data_processor.task_pipeline.operators=[]"])
        diagnostics = [each for stage in config.stages for each in workflow_diagnostics(stage, tmp_path)]
        return [f"{'.'.join(map(str, each.path))}: {each.message}" for each in diagnostics]

    return found


def test_a_wrong_argument_is_reported_with_its_key(found: Found) -> None:
    (text,) = found("reward_fn_args={format_wight: 1}")
    assert text.startswith(f"{TASKSET}.reward_fn_args: reward function 'math_reward': unknown argument")


def test_code_of_the_user_is_loaded_elsewhere_and_all_its_problems_are_reported(
    found: Found, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(
        "print('what is printed while the file is loaded does no harm')\n"
        "class Workflow:\n"
        "    def __init__(self, reward_fn, max_turns: int = 2): ...\n"
        "    def run(self, task, model): ...\n"
    )
    args = ("workflow_args={max_turn: 3}", "default_reward_fn_type=./own.py:none")
    texts = found("default_workflow_type=./own.py:Workflow", *args)
    assert [text.split(": ")[0].split(".")[-1] for text in texts] == [
        "workflow_args", "default_workflow_type", "default_reward_fn_type",
    ]  # fmt: skip


def test_a_file_that_ends_its_process_ends_no_check(found: Found, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import os\nos._exit(3)\n")
    (text,) = found("default_workflow_type=./ends.py:X")
    assert "the process that loaded it ended with exit code 3" in text


def test_a_column_that_a_reward_asks_for_and_the_task_set_lacks_is_reported(
    found: Found, tmp_path: Path
) -> None:
    (tmp_path / "words.jsonl").write_text('{"question": "1 + 1", "answer": 2, "unit": "kg"}\n')
    (tmp_path / "trl.py").write_text("def right(prompts, completions, untit, **columns): return [0.0]\n")
    (text,) = found(f"path={tmp_path / 'words.jsonl'}", "default_reward_fn_type=./trl.py:right")
    assert (
        "asks for the column 'untit', which the task set does not have; it has answer, question, unit" in text
    )
    assert "did you mean 'unit'?" in text


def test_a_run_that_rewards_code_says_what_this_machine_does_not_keep_it_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    assert list(notes_about_code(load_pipeline_file(FAKE))) == []
    config = load_pipeline_file(FAKE, [f"{TASKSET}.default_reward_fn_type=code_reward"])
    unprotected = run_code("").unprotected
    notes = list(notes_about_code(config))
    assert len(notes) == bool(unprotected)
    assert all(PROTECTIONS[name] in note for note in notes for name in unprotected)
