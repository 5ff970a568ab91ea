"""`trinity-data verify-rewards` names rewards that were changed and skips what a row does not hold."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from trinity_data.cli.main import cli
from trinity_data.config import RunConfig
from trinity_data.schema import experience_id, group_id, rows_to_table
from trinity_data.store.store import Store
from trinity_data.store.types import Commit

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "rewards.md"
# math_reward gives 1.1 for a right marked answer, 0.1 for a wrong marked one
RIGHT, WRONG = ("#### 7", 1.1), ("#### 8", 0.1)

Answer = tuple[str, float | None]


def task(number: int, workflow: str = "math_workflow", reward_fn: str = "") -> dict[str, object]:
    return {
        "task_id": f"task-{number}", "stage": "rl", "taskset": "gsm8k", "position": number, 
        "prompt": "3 + 4?",
        "messages": [{"role": "user", "content": "3 + 4?"}], "answer": "#### 7", "workflow": workflow,
        "reward_fn": reward_fn, "columns": "{}", "kept": True,
    }  # fmt: skip


@pytest.fixture
def stored(
    tmp_path: Path, pipeline: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Path]:
    """`stored(*(task, answers))`: a run of one step with a group for each task; code lies in its folder."""
    monkeypatch.chdir(tmp_path)

    def write(*groups: tuple[dict[str, object], list[Answer]]) -> Path:
        job = tmp_path / "tests" / "run"
        job.mkdir(parents=True)
        (job / "config.json").write_text(pipeline().model_dump_json())
        rows = [
            {"experience_id": experience_id(group_id("explorer", "rl", 1, number), rollout),
             "group_id": group_id("explorer", "rl", 1, number), "task_id": each["task_id"], "stage": "rl",
             "step": 1, "position": number, "rollout": rollout, "turn": 0, "prompt_length": 1,
             "token_ids": [1, 2], "response_text": text, "reward": reward,
             "error": "" if reward is not None else "broke"}
            for number, (each, answers) in enumerate(groups)
            for rollout, (text, reward) in enumerate(answers)
        ]  # fmt: skip
        store = Store.create_or_open(job / "store")
        tasks = rows_to_table("tasks", [each for each, _ in groups])
        store.commit(Commit(tables={"tasks": tasks, "experiences": rows_to_table("experiences", rows)}))
        store.close()
        return job

    return write


def verify(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["verify-rewards", *arguments])


def test_a_run_whose_rewards_are_what_was_stored_ends_with_exit_code_0(stored: Callable[..., Path]) -> None:
    run = stored((task(0), [RIGHT, WRONG, ("", None)]))
    result = verify(str(run))
    assert result.exit_code == 0, result.output
    # the failed rollout has no reward
    assert result.stdout == f"{run}: 2 of 2 rewards recomputed: 2 equal, 0 different\n"


def test_a_changed_reward_is_named_with_both_values_as_the_page_shows(stored: Callable[..., Path]) -> None:
    stored((task(0), [RIGHT, ("#### 8", 1.1)]), (task(1, "./game.py:Game"), [("a1", 1.0), ("b2", 0.0)]))
    result = verify("tests/run")
    assert result.exit_code == 1
    (shown,) = re.findall(
        r"```console\n\$ trinity-data verify-rewards tests/run\n(.*?)```", PAGE.read_text(), re.S
    )
    assert [line.rstrip() for line in result.stdout.splitlines()] == shown.splitlines()


def test_rewards_that_cannot_be_recomputed_are_not_called_equal(stored: Callable[..., Path]) -> None:
    run = stored((task(0, "./game.py:Game"), [("a1", 1.0), ("b2", 0.0)]))
    result = verify(str(run))
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        f"{run}: 0 of 2 rewards recomputed: nothing to measure",
        "skipped 2: workflow './game.py:Game': it may ask several times or use an environment",
    ]


def test_a_sample_is_of_so_many_rollouts_and_the_same_each_time(stored: Callable[..., Path]) -> None:
    run = stored((task(0), [("#### 8", 1.1)] * 20))
    first, again = verify(str(run), "--sample", "3"), verify(str(run), "--sample", "3")
    assert first.exit_code == 1
    assert "3 of 3 rewards recomputed: 0 equal, 3 different" in first.stdout
    assert first.stdout == again.stdout


def test_own_functions_are_computed_again_and_async_ones_are_skipped(
    stored: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "def half(text, answer):\n    if text == 'bad':\n        raise ValueError('no number')\n"
        "    return 0.5 * (answer in text)\n"
        "async def ask(text, answer):\n    return 1.0\n"
    )
    run = stored(
        (task(0, reward_fn="./mine.py:half"), [("#### 7", 0.5), ("bad", 0.0)]),
        (task(1, reward_fn="./mine.py:ask"), [("#### 7", 0.0)]),
    )
    result = verify(str(run))
    assert result.exit_code == 1
    assert "2 of 3 rewards recomputed: 1 equal, 1 different" in result.stdout
    assert "no number" in result.stdout
    assert (
        "skipped 1: reward function './mine.py:ask': it is async, as one that asks a reward model is"
        in result.stdout
    )


def test_a_file_that_is_not_there_is_an_error_that_says_where_it_was_looked_for(
    stored: Callable[..., Path], tmp_path: Path
) -> None:
    result = verify(str(stored((task(0, reward_fn="./gone.py:half"), [RIGHT]))))
    assert "gone.py" in str(result.exception)
    assert f"is looked for in the working directory, {tmp_path}" in str(result.exception)
