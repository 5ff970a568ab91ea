"""`trinity-data why` and `why-not`: the chain in words, from the file to the optimizer step."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trinity_data.cli.main import app
from trinity_data.query.lineage import Lineage
from trinity_data.schema import rows_to_table
from trinity_data.store.sql import open_sql
from trinity_data.store.store import Store
from trinity_data.store.types import Commit

Command = Callable[..., tuple[int, str, str]]
SECOND = "explorer/grpo/0000001/00000/001/00"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command line; gives the exit code and what it printed."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["trinity-data", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            app()
            sys.exit(0)
        code = ended.value.code
        return (code if isinstance(code, int) else 0, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def tasks(small_run: Path) -> list[str]:
    with open_sql([small_run]) as session:
        return list(session.query("SELECT task_id FROM tasks ORDER BY position")["task_id"].to_pylist())


def test_an_experience_is_reported_from_its_source_to_its_step(small_run: Path, command: Command) -> None:
    code, out, _ = command("why", small_run, SECOND)
    assert code == 0
    told = [
        f"experience {SECOND}: trained in step 1",
        "problems",
        "number 0 of gsm8k (train) in stage grpo",
        "difficulty_filter (version 1) kept it, value 1 [min_steps 1, max_steps 2]",
        "rollout 1, turn 0 of step 1: explorer 'explorer', engine 'fake', model version 0",
        "seed 41, temperature 1, top_p 0.5, top_k -1, max_tokens 32; 1 + 2 tokens",
        "raw reward 1 (accuracy 1)",
        "reward_std_filter (version 1) kept it, value 0.5",
        "reward_shaping_mapper (version 1) kept it, 1 → 1.5",
        "; reward 1 → 1.5",
        "reward 1.5, advantage 0.5",
        "group explorer/grpo/0000001/00000: 2 rows, mean reward 1",
        (
            "step 1, place 1: importance weight 0.75, 50% of its tokens clipped, advantage 0.5, "
            "0.125 of the loss 0.25"
        ),
        "learning rate 0.001, gradient norm 2, made model version 1; first held by checkpoint global_step_1",
    ]
    at = -1
    for part in told:  # in this order
        found = out.find(part, at + 1)
        assert found > at, f"{part!r} is not told after {told[told.index(part) - 1]!r} in:\n{out}"
        at = found


@pytest.mark.parametrize("what", ["1", "global_step_1", "checkpoints/x/global_step_1/actor/"])
def test_a_step_and_a_checkpoint_are_reported_in_tables(small_run: Path, command: Command, what: str) -> None:
    code, out, _ = command("why", small_run, what)
    lines = [line.split() for line in out.splitlines()]
    assert (code, out.splitlines()[0]) == (0, "step 1; first held by checkpoint global_step_1")
    assert ["grpo", "0", "reward_std_filter", "1", "4", "2", "0", "0.5"] in lines
    assert ["1", "grpo", "2", "0.5", "1", "0.25", "0.001", "1", "1", "1"] in lines


def test_a_failed_try_says_why(small_run: Path, command: Command) -> None:
    _, out, _ = command("why", small_run, "explorer/grpo/0000002/00000/001/00")
    assert out.startswith("experience explorer/grpo/0000002/00000/001/00: failed: deadline passed\n")


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (0, "it was trained, in step 1"),
        (1, "tried, never trained: all its 2 rollouts dropped by reward_std_filter: no variance"),
        (3, "dropped by difficulty_filter (steps of the reference answer: above 2), so it was never tried"),
        (4, "read and kept, never tried: 0 kept task(s) came before it in the queue"),
    ],
)
def test_why_not_names_the_reason(
    small_run: Path, tasks: list[str], command: Command, number: int, told: str
) -> None:
    code, out, _ = command("why-not", small_run, tasks[number][:16])
    assert (code, out.splitlines()[0]) == (0, f"task {tasks[number]}, stage grpo: {told}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("why", "nope"), "'nope' is no experience of"),
        (("why", "7"), "step 7: no batch holds a row; there are steps 1 to 2"),
        (("why", "global_step_7"), "there are: global_step_1"),
        (("why-not", "nope"), "no task that the run has read, nor is it in its task sets: gsm8k (grpo)"),
    ],
)
def test_what_is_not_there_is_reported_in_one_line(
    small_run: Path, command: Command, words: tuple[str, str], message: str
) -> None:
    code, out, err = command(words[0], small_run, words[1])
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert message in err


def test_the_page_shows_what_the_command_prints(small_run: Path, command: Command) -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "lineage.md").read_text()
    shown = re.findall(r"```\n\$ trinity-data why tests/small (\S+)\n(.*?)```", page, flags=re.DOTALL)
    assert shown
    for what, text in shown:
        assert command("why", small_run, what)[1].replace(f"{small_run.parents[1]}/", "") == text


def test_a_rollout_of_several_turns_counts_once(small_run: Path, command: Command, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(small_run, copied)
    rows: list[dict[str, object]] = [
        {"experience_id": f"explorer/grpo/0000003/00000/{rollout:03d}/{turn:02d}", "task_id": "t",
         "stage": "grpo", "step": 3, "group_id": "explorer/grpo/0000003/00000", "position": 0,
         "rollout": rollout, "turn": turn, "error": "", "reward": float(rollout), "engine": "fake",
         "prompt_length": 1, "response_length": 1, "info": "{}"}
        for rollout, turns in ((0, 1), (1, 3)) for turn in range(turns)
    ]  # fmt: skip
    keys = ("experience_id", "group_id", "stage", "step", "reward")
    outcomes = [{key: row[key] for key in keys} | {"kept": True, "advantage": 1.0} for row in rows]
    tables = {
        "experiences": rows_to_table("experiences", rows),
        "outcomes": rows_to_table("outcomes", outcomes),
    }
    store = Store.create_or_open(copied / "store")
    store.commit(Commit(tables=tables, progress={"stage_done/grpo": 3}))
    _, out, _ = command("why", copied, "explorer/grpo/0000003/00000/001/02")
    assert "kept, and waits for a batch; none came: the stage ended with step 3" in out
    assert "group explorer/grpo/0000003/00000: 4 rows of 2 rollouts, mean reward 0.5" in out
    _, out, _ = command("why-not", copied, "t")
    assert "all its 2 rollouts wait for a batch" in out
    store.form_batch("grpo", 3, store.pending("grpo"))
    store.close()
    with Lineage(copied) as lineage:
        told = lineage.steps(3, 3)
    assert (told.steps[0]["experiences"], told.steps[0]["reward"]) == (4, 0.5)
    assert told.groups[0]["raw_reward"] == 0.5
