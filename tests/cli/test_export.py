"""Exports: the columns of other trainers, exactly the rows asked for, and the same bytes again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from datasets import load_dataset

from trinity_data.errors import StoreError
from trinity_data.exchange.export import Exported, Request, export, export_again
from trinity_data.exchange.kinds import Format, Kind
from trinity_data.schema import experience_id, group_id, message_row, rows_to_table
from trinity_data.store.store import Store
from trinity_data.store.types import Commit

REWARDS: dict[int, list[float | None]] = {0: [0.0, 1.0, 0.5, 1.0], 1: [1.0, 1.0], 2: [0.25, None]}


def question(position: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"question {position}"}]


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def row(
    position: int, rollout: int, reward: float | None, turn: int = 0, error: str = ""
) -> dict[str, object]:
    group = group_id("explorer", "rl", 1, position)
    return {
        "experience_id": experience_id(group, rollout, turn),
        "task_id": f"task-{position}",
        "group_id": group,
        "stage": "rl",
        "step": 1,
        "position": position,
        "rollout": rollout,
        "turn": turn,
        "messages": question(position),
        "response_text": f"answer {position}.{rollout}",
        "reward": reward,
        "reward_parts": {"accuracy": 0.5},
        "error": error,
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Groups of 4, 2 and 2; in a fourth group two failed and one has two turns."""
    rows = [row(p, r, reward) for p, rewards in REWARDS.items() for r, reward in enumerate(rewards)]
    rows += [
        row(3, 0, 1.0, error="broke"),
        row(3, 1, 1.0, error="broke"),
        row(3, 2, 1.0),
        row(3, 2, 1.0, turn=1),
    ]
    rows.append(row(3, 3, 0.0))
    return write(tmp_path / "project" / "run", rows)


def write(job: Path, rows: list[dict[str, object]]) -> Path:
    job.mkdir(parents=True, exist_ok=True)
    store = Store.create_or_open(job / "store")
    store.commit(Commit(tables={"experiences": rows_to_table("experiences", rows)}))
    store.close()
    return job


@pytest.fixture
def to(tmp_path: Path) -> Callable[[], Path]:
    numbers = iter(range(100))
    return lambda: tmp_path / f"out-{next(numbers)}"


def read(done: Exported) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = pq.read_table(done.folder / "train.parquet").to_pylist()
    return rows


def test_dpo_pairs_the_best_with_the_worst_of_each_group(run: Path, to: Callable[[], Path]) -> None:
    done = export(run, Request(kind=Kind.DPO), to())
    assert read(done) == [
        {"prompt": question(0), "chosen": answer("answer 0.1"), "rejected": answer("answer 0.0")}
    ]
    assert done.left_out == {"failed": 2, "several turns": 2, "no reward": 1}


def test_dpo_pairs_what_a_query_pairs(run: Path, to: Callable[[], Path]) -> None:
    query = (
        "SELECT a.experience_id AS chosen, b.experience_id AS rejected FROM experiences a JOIN experiences b "
        "USING (group_id) WHERE a.rollout = 2 AND b.rollout = 0 AND a.error = '' AND b.error = '';"
    )
    done = export(run, Request(kind=Kind.DPO, query=query, ids=True), to())
    prefix = group_id("explorer", "rl", 1, 0)
    assert read(done) == [
        {
            "prompt": question(0),
            "chosen": answer("answer 0.2"),
            "rejected": answer("answer 0.0"),
            "chosen_id": f"{prefix}/002/00",
            "rejected_id": f"{prefix}/000/00",
        }
    ]


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("SELECT 1 AS chosen", "must select chosen and rejected"),
        ("SELECT 'x' AS chosen, 'y' AS rejected", "no experience of this run"),
        (
            (
                "SELECT min(experience_id) AS chosen, "
                "max(experience_id) AS rejected FROM experiences WHERE position < 2"
            ),
            "different prompts",
        ),
        (
            (
                "SELECT min(experience_id) AS chosen, "
                "max(experience_id) AS rejected FROM experiences WHERE position = 3"
            ),
            "failed, has no text or several turns",
        ),
    ],
)
def test_pairs_that_make_no_sense_are_refused(
    run: Path, to: Callable[[], Path], query: str, why: str
) -> None:
    with pytest.raises(StoreError, match=why):
        export(run, Request(kind=Kind.DPO, query=query), to())


def test_sft_has_prompt_and_completion_or_messages(run: Path, to: Callable[[], Path]) -> None:
    where = "raw_reward = 1 and position = 0"
    rows = read(export(run, Request(kind=Kind.SFT, where=where), to()))
    assert rows == [{"prompt": question(0), "completion": answer(f"answer 0.{n}")} for n in (1, 3)]
    rows = read(export(run, Request(kind=Kind.SFT, where=where, messages=True), to()))
    assert rows == [{"messages": [*question(0), *answer(f"answer 0.{n}")]} for n in (1, 3)]


def test_tool_calls_are_exported_as_trainers_read_them(tmp_path: Path, to: Callable[[], Path]) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    tools = [{"type": "function", "function": {"name": "add"}}]
    chat = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    asked = {"messages": [message_row(message) for message in chat], "tools": json.dumps(tools)}
    job = write(tmp_path / "tools", [row(0, 0, 1.0) | asked, row(1, 0, 1.0)])
    done = export(job, Request(kind=Kind.SFT, format=Format.JSONL), to())
    first, second = map(json.loads, (done.folder / "train.jsonl").read_text().splitlines())
    assert first == {"prompt": chat, "completion": answer("answer 0.0"), "tools": tools}
    assert second == {"prompt": question(1), "completion": answer("answer 1.0"), "tools": None}
    stored = read(export(job, Request(kind=Kind.SFT), to()))[0]["prompt"]
    assert stored[1] == {"role": "assistant", "content": None, "tool_calls": json.dumps([call]),
                         "tool_call_id": None}  # fmt: skip


def test_kto_labels_by_the_raw_reward(run: Path, to: Callable[[], Path]) -> None:
    done = export(run, Request(kind=Kind.KTO, where="position in (0, 2)", threshold=0.4), to())
    assert [r["label"] for r in read(done)] == [False, True, True, True, False]
    assert done.left_out == {"no reward": 1}


def test_raw_has_every_column_and_row(run: Path, to: Callable[[], Path]) -> None:
    done = export(run, Request(kind=Kind.RAW, format=Format.JSONL), to())
    rows = [json.loads(line) for line in (done.folder / "train.jsonl").read_text().splitlines()]
    assert len(rows) == 13
    assert rows[1]["raw_reward"] == 1.0 and rows[1]["reward_parts"] == {"accuracy": 0.5}
    assert rows[1]["state"] == "raw" and rows[8]["state"] == "failed"


@pytest.mark.parametrize("form", list(Format))
def test_datasets_reads_the_folder(run: Path, to: Callable[[], Path], form: Format, tmp_path: Path) -> None:
    done = export(run, Request(kind=Kind.DPO, format=form), to())
    pairs = load_dataset(str(done.folder), split="train", cache_dir=str(tmp_path / "cache"))
    assert pairs.column_names == ["prompt", "chosen", "rejected"]
    assert pairs[0]["chosen"] == answer("answer 0.1")


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("form", list(Format))
def test_the_same_export_is_the_same_bytes(
    run: Path, to: Callable[[], Path], kind: Kind, form: Format
) -> None:
    first, second = (export(run, Request(kind=kind, format=form), to()) for _ in range(2))
    for file in first.folder.iterdir():
        assert file.read_bytes() == (second.folder / file.name).read_bytes()


def test_a_manifest_gives_the_same_files_although_the_run_went_on(run: Path, to: Callable[[], Path]) -> None:
    first = export(run, Request(kind=Kind.SFT), to())
    write(run, [row(9, 0, 1.0)])
    assert export(run, Request(kind=Kind.SFT), to()).num_rows == first.num_rows + 1
    again = export_again(run, first.folder, to())
    assert again.manifest == first.manifest


def test_a_manifest_that_cannot_be_met_leaves_nothing(run: Path, to: Callable[[], Path]) -> None:
    done, target = export(run, Request(kind=Kind.SFT), to()), to()
    manifest = json.loads((done.folder / "manifest.json").read_text())
    manifest["files"]["train.parquet"]["sha256"] = "0" * 64
    (done.folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match="no longer gives the files"):
        export_again(run, done.folder, target)
    assert not target.exists()


def test_nothing_is_written_when_something_is_wrong(run: Path, to: Callable[[], Path]) -> None:
    target = to()
    before = sorted(target.parent.iterdir())
    with pytest.raises(StoreError, match="rewrd"):
        export(run, Request(kind=Kind.SFT, where="rewrd > 1"), target)
    with pytest.raises(StoreError, match=r"no rows to export \(left out: 2 failed"):
        export(run, Request(kind=Kind.SFT, where="error <> ''"), target)
    assert sorted(target.parent.iterdir()) == before
    target.mkdir()
    with pytest.raises(StoreError, match="exists already"):
        export(run, Request(kind=Kind.SFT), target)


def test_a_condition_reaches_nothing_but_the_run(run: Path, to: Callable[[], Path], tmp_path: Path) -> None:
    (tmp_path / "secret.csv").write_text("a\n1\n")
    with pytest.raises(StoreError):
        export(run, Request(kind=Kind.RAW, where=f"1 IN (SELECT a FROM '{tmp_path}/secret.csv')"), to())
