"""`trinity-data audit`: the books as a person reads them, and an exit code that tells the truth."""

from __future__ import annotations

import shutil
import sqlite3
import sys
from pathlib import Path

import pytest

from trinity_data.cli.main import app
from trinity_data.query.audit import audit
from trinity_data.query.lineage import Lineage
from trinity_data.schema import rows_to_table
from trinity_data.store.reader import pending_at_the_end
from trinity_data.store.store import Store
from trinity_data.store.types import Commit, State


@pytest.fixture
def copied(small_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(small_run, tmp_path / "run")
    return tmp_path / "run"


def run_audit(run: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["trinity-data", "audit", str(run)])
    with pytest.raises(SystemExit) as ended:
        app()
        sys.exit(0)
    return int(ended.value.code or 0)


def test_every_row_of_a_sound_run_is_accounted_for(
    small_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_audit(small_run, monkeypatch) == 0
    out = capsys.readouterr().out
    table = [line.split() for line in out.splitlines()]
    assert ["grpo", "1", "4", "2", "2", "0", "0", "0", "0", "reward_std_filter", "2"] in table
    assert ["grpo", "2", "2", "1", "0", "0", "0", "1", "0"] in table
    assert ["gsm8k", "6", "3", "2", "0", "0", "1", "0", "reward_std_filter", "2"] in table
    assert ["grpo", "gsm8k", "5", "3", "1", "1"] in table
    assert (
        "6 generated = 3 trained + 2 dropped (reward_std_filter 2) + 0 stale + 0 pending + 1 failed, "
        "0 unexplained"
    ) in out
    assert "every checksum agrees" in out
    assert (
        "note: stage grpo: 1 of 6 rollouts failed; commonest (1 times): deadline passed; "
        f"`trinity-data why {small_run} explorer/grpo/0000002/00000/001/00` shows one"
    ) in out
    assert out.count("note:") == 1


def test_a_changed_state_is_named_and_the_exit_code_is_one(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = sqlite3.connect(copied / "store" / "ledger.sqlite")
    ledger.execute("UPDATE experiences SET state = 'stale' WHERE state = 'failed'")
    ledger.commit()
    ledger.close()
    assert run_audit(copied, monkeypatch) == 1
    assert (
        "another state than its rows: explorer/grpo/0000002/00000/001/00 is stale" in capsys.readouterr().err
    )


def test_a_flipped_byte_is_named_with_its_file(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = next((copied / "store" / "segments" / "experiences").glob("*.parquet"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    assert run_audit(copied, monkeypatch) == 1
    err = capsys.readouterr().err
    assert file.name in err
    assert "is damaged: its checksum is" in err


@pytest.mark.parametrize(
    ("position", "finding"),
    [
        (
            6,
            (
                "rows of a task set were skipped or read twice: stage grpo, gsm8k: "
                "6 rows with 6 positions up to 6"
            ),
        ),
        (
            4,
            (
                "rows of a task set were skipped or read twice: stage grpo, gsm8k: "
                "6 rows with 5 positions up to 4"
            ),
        ),
        (5, "a task set was read to another row than its tasks say: tasks/grpo/gsm8k: row 5, 6 tasks"),
    ],
)
def test_a_task_that_was_skipped_or_read_twice_is_found(copied: Path, position: int, finding: str) -> None:
    row = {"task_id": "new", "stage": "grpo", "taskset": "gsm8k", "position": position, "kept": True}
    add(copied, Commit(tables={"tasks": rows_to_table("tasks", [row])}))
    report = audit(copied)
    assert not report.ok
    assert finding in report.problems


def test_a_dropped_task_that_was_tried_is_found(copied: Path) -> None:
    row = {"task_id": "new", "stage": "grpo", "taskset": "gsm8k", "position": 5, "kept": False}
    group = {"group_id": "g", "stage": "grpo", "step": 3, "task_id": "new"}
    tables = {"tasks": rows_to_table("tasks", [row]), "groups": rows_to_table("groups", [group])}
    add(copied, Commit(tables=tables, progress={"tasks/grpo/gsm8k": {"rows_read": 6}}))
    assert audit(copied).problems == ["a task that an operator had dropped was tried: new in g"]


def test_rows_that_no_operator_processed_yet_count_as_pending(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"experience_id": "e", "task_id": "t", "group_id": "g", "stage": "grpo", "step": 3, "position": 0,
     "rollout": 0,
           "turn": 0, "error": "", "info": "not JSON"}  # fmt: skip
    add(copied, Commit(tables={"experiences": rows_to_table("experiences", [row])}))
    assert run_audit(copied, monkeypatch) == 0
    assert "1 pending (1 of them not processed yet) + 1 failed, 0 unexplained" in capsys.readouterr().out
    with Lineage(copied) as lineage:  # whose `info` is not to be read either
        assert lineage.experience("e").origin.source == ""


def failing_rows(step: int, errors: list[str], *, turns: int = 1) -> list[dict[str, object]]:
    return [
        {"experience_id": f"explorer/grpo/{step:07d}/00009/{rollout:03d}/{turn:02d}", "task_id": "t",
         "group_id": "g", "stage": "grpo", "step": step, "position": 9, "rollout": rollout, "turn": turn,
         "error": error, "info": ""}
        for rollout, error in enumerate(errors) for turn in range(1 if error else turns)
    ]  # fmt: skip


def test_what_failed_what_trained_nothing_and_what_waits_is_remarked(copied: Path) -> None:
    errors = ["no end after 5 s; 1 replies came", "no end after 5 s; 7 replies came", "E: x\nat 3", "", ""]
    rows = failing_rows(3, errors, turns=3)
    steps = [
        {"step": 2, "stage": "grpo", "num_experiences": 1, "loss": 0.5},
        {"step": 3, "stage": "grpo", "num_experiences": 0},
    ]
    tables = {"experiences": rows_to_table("experiences", rows), "steps": rows_to_table("steps", steps)}
    add(copied, Commit(tables=tables))
    report = audit(copied)
    assert report.problems == []
    assert report.remarks == [
        "stage grpo: 4 of 11 rollouts failed; commonest (2 times): no end after 5 s; 1 replies came; "
        f"`trinity-data why {copied} explorer/grpo/0000003/00009/000/00` shows one",
        "stage grpo: 1 of 3 steps had nothing to train, the first of them step 3, the last step 3",
        "stage grpo: 2 rollouts (6 rows) made for step 3 wait untrained: the stage is not done: "
        "they are trained as it goes on, by the same command where it has stopped",
    ]
    add(copied, Commit(progress={"stage_done/grpo": 3}))
    assert (
        audit(copied)
        .remarks[-1]
        .endswith(
            "the stage ended at step 3, and its batches took fewer rollouts than were kept "
            "(buffer.train_batch_size)"
        )
    )


def test_a_stage_that_ends_with_rollouts_waiting_says_how_many(copied: Path) -> None:
    store = Store.create_or_open(copied / "store")
    assert pending_at_the_end(store, "grpo", ended_at=2) is None
    rows = rows_to_table(
        "experiences", [*failing_rows(3, ["", ""], turns=120), *failing_rows(4, [""], turns=2)]
    )
    store.commit(Commit(tables={"experiences": rows}))
    said = str(pending_at_the_end(store, "grpo", ended_at=4))
    store.close()
    assert said.startswith(
        "stage grpo: 3 rollouts (242 rows) made for steps 3 to 4 wait untrained: the stage ended at"
    )
    assert said in audit_after(copied, "grpo", 4)


def audit_after(run: Path, stage: str, step: int) -> list[str]:
    add(run, Commit(progress={f"stage_done/{stage}": step}))
    return audit(run).remarks


def test_training_data_is_kept_apart_from_task_sets(copied: Path) -> None:
    row = {"experience_id": "e", "task_id": "t", "group_id": "g", "stage": "sft", "step": 1, "position": 0,
     "rollout": 0,
           "turn": 0, "error": "", "info": '{"source": "some/answers.jsonl", "row": 7}'}  # fmt: skip
    add(copied, Commit(tables={"experiences": rows_to_table("experiences", [row])}))
    books = audit(copied).tasksets
    assert {name: book.generated for name, book in books.items()} == {
        "gsm8k": 6,
        "training data answers.jsonl": 1,
    }
    assert books["training data answers.jsonl"].states[State.RAW] == 1


def add(run: Path, commit: Commit) -> None:
    store = Store.create_or_open(run / "store")
    store.commit(commit)
    store.close()
