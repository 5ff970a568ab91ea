from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest

from trinity_data.claims import Claims
from trinity_data.cli.runs import runs
from trinity_data.errors import StoreError
from trinity_data.job_lock import hold
from trinity_data.progress import claims_key, explored_key
from trinity_data.runs import default_root, find_runs, resolve_run
from trinity_data.schema import rows_to_table
from trinity_data.store.participants import Participant, Participants
from trinity_data.store.store import Store
from trinity_data.store.types import Commit, Place


def make_run(
    root: Path, name: str, *, changed: float, step: int = 0, accuracies: list[float] | None = None
) -> Path:
    store = Store.create_or_open(root / "tests" / name / "store")
    tables = {}
    if step:
        tables["steps"] = rows_to_table("steps", [{"step": n, "stage": "rl"} for n in range(1, step + 1)])
    if accuracies:
        evals = [{"step": n // 2, "stage": "rl", "accuracy": value} for n, value in enumerate(accuracies)]
        tables["evals"] = rows_to_table("evals", evals)
    store.commit(Commit(tables=tables))
    store.close()
    os.utime(root / "tests" / name / "store" / "ledger.sqlite", (changed, changed))
    return root / "tests" / name


def test_a_run_names_the_processes_that_work_on_it_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def line() -> str:
        runs(tmp_path)
        return capsys.readouterr().out.rstrip()

    run = make_run(tmp_path, "several", changed=1e9)
    with hold(run, "process 7"):
        assert line().endswith("accuracy –  running: process 7")
    here = Participant.this_process("trainer")
    store = Store.create_or_open(run / "store")
    participants = Participants(store)
    participants.join(here)
    explorer = participants.join(replace(here, name="explorer:left", machine="another", host="node2"))
    participants.join(replace(here, name="explorer:right", process_start=0))
    claims = Claims(8, {5: Place("explorer:right", 1), 7: explorer, 6: explorer})
    progress = {claims_key("rl"): claims.dump(), explored_key("rl"): 4}
    steps = rows_to_table("steps", [{"step": 1, "stage": "rl"}])
    store.commit(Commit(tables={"steps": steps}, progress=progress))
    process = os.getpid()
    with hold(run, "several", shared=True):
        trainer = f"trainer (process {process} on {here.host}, trained step 1, 3 more explored)"
        explores = f"explorer:left (process {process} on node2, explores step 6, 7)"
        assert line().endswith(f"  running: {explores}, {trainer}")
        runs(tmp_path, as_json=True)
        assert json.loads(capsys.readouterr().out) == {
            "run": "tests/several", "changed": ANY, "step": 1, "experiences": 0, "failed": 0, "waiting": 0,
            "accuracy": None, "running": f"{explores}, {trainer}",
            "participants": [
                {"name": "explorer:left", "process": process, "host": "node2", "explores": [6, 7]},
                {
                    "name": "trainer", "process": process, "host": here.host, "trained": 1, "explored": 3,
                },
            ],
        }  # fmt: skip
        participants.leave(explorer)
        assert line().endswith(f"  running: {trainer}")
    assert line().endswith("accuracy –")
    store.close()


def test_runs_are_listed_the_newest_last_with_their_last_accuracy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, "second", changed=2e9, step=12, accuracies=[0.1, 0.3, 0.5, 0.75])
    make_run(tmp_path, "first", changed=1e9)
    runs(tmp_path)
    first, second = capsys.readouterr().out.splitlines()
    assert first.split()[0] == "tests/first" and first.endswith("accuracy –")
    assert second.split()[0] == "tests/second" and "step     12" in second
    assert "experiences        0  failed      0  waiting      0" in second
    # of the two evaluated tasks of the last evaluated step: (0.5 + 0.75) / 2
    assert second.endswith("accuracy 0.625")


def test_failed_and_waiting_rows_are_listed(small_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs(small_run.parents[1])
    (line,) = capsys.readouterr().out.splitlines()
    assert "experiences        6  failed      1  waiting      0" in line


def test_a_root_without_runs_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs(tmp_path)
    assert capsys.readouterr().out == f"no runs under {tmp_path}\n"


def test_a_run_is_found_by_its_path_and_by_its_name_under_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path, "mine", changed=1e9)
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    assert default_root() == tmp_path
    assert resolve_run(str(folder)) == resolve_run("tests/mine") == folder
    assert find_runs(tmp_path) == [folder]


def test_an_unknown_name_is_answered_with_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, "mine", changed=1e9)
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    with pytest.raises(
        StoreError, match=r"no run 'tests/mien'; known under .*: tests/mine \(did you mean 'tests/mine'\?\)"
    ):
        resolve_run("tests/mien")
