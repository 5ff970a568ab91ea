"""Rollouts made elsewhere become rows that can be asked, audited and exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import load_dataset
from typer.testing import CliRunner

from trinity_data.cli.main import cli
from trinity_data.errors import ConfigError, StoreError
from trinity_data.exchange.import_ import ColumnMapping, import_experiences
from trinity_data.query.audit import audit
from trinity_data.store.sql import open_sql
from trinity_data.tokenizer import load_tokenizer

SOLUTIONS = Path(__file__).parents[3] / "shared" / "gsm8k_solutions" / "example_model_solutions.jsonl"
MAP = ["prompt=question", "answer=ground_truth", "response=*.solution", "reward=*.is_correct"]


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(run: Path, query: str) -> list[dict[str, object]]:
    with open_sql([run]) as session:
        rows: list[dict[str, object]] = session.query(query).to_pylist()
    return rows


LONG: list[dict[str, object]] = [
    {"q": "1+1?", "text": "2", "good": True, "model": "a"},
    {"q": "2+2?", "text": "5", "good": False, "model": "a"},
    {"q": "1+1?", "text": "3", "good": False, "model": "b"},
    {"q": "2+2?", "text": None, "good": None, "model": "b"},
]
LONG_MAP = ColumnMapping.parse(["prompt=q", "response=text", "reward=good", "explorer=model"])


def test_rows_of_one_prompt_are_one_group(tmp_path: Path) -> None:
    made = import_experiences([write(tmp_path / "long.jsonl", LONG)], tmp_path / "run", mapped=LONG_MAP)
    assert (made.num_tasks, made.num_experiences, made.num_rewarded) == (2, 4, 3)
    found = asked(
        made.folder,
        "SELECT position, rollout, explorer, engine, raw_reward, state, json_extract(info, "
        "'$.row')::INT AS row FROM experiences ORDER BY position, rollout",
    )
    assert [tuple(row.values()) for row in found] == [
        (0, 0, "a", "imported", 1.0, "raw", 0),
        (0, 1, "b", "imported", 0.0, "raw", 2),
        (1, 0, "a", "imported", 0.0, "raw", 1),
        (1, 1, "b", "imported", None, "failed", 3),
    ]
    assert asked(
        made.folder,
        "SELECT prompt, source_row, repeat_times FROM tasks JOIN groups USING (task_id) ORDER BY 2",
    ) == [
        {"prompt": "1+1?", "source_row": 0, "repeat_times": 2},
        {"prompt": "2+2?", "source_row": 1, "repeat_times": 2},
    ]
    assert audit(made.folder).problems == []


def test_a_list_of_responses_is_a_group(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {
            "prompt": [{"role": "user", "content": "1+1?"}],
            "response": ["2", "3"],
            "reward": [1.0, 0.25],
            "answer": "2",
        }
    ]
    mapped = ColumnMapping.parse(["reward=reward", "answer=answer"])
    made = import_experiences([write(tmp_path / "lists.jsonl", rows)], tmp_path / "run", mapped=mapped)
    found = asked(made.folder, "SELECT response_text, raw_reward FROM experiences ORDER BY rollout")
    assert [tuple(row.values()) for row in found] == [("2", 1.0), ("3", 0.25)]
    assert asked(made.folder, "SELECT answer FROM tasks") == [{"answer": "2"}]


def test_with_a_tokenizer_the_rows_can_be_trained_on(tmp_path: Path, tiny_model: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    file = write(tmp_path / "long.jsonl", LONG)
    made = import_experiences([file], tmp_path / "run", mapped=LONG_MAP, tokenizer=tokenizer)
    row, failed = asked(
        made.folder,
        "SELECT token_ids, prompt_length, response_length, len(action_mask) AS masked FROM rollouts "
        "WHERE response_text = '2' OR error <> '' ORDER BY position",
    )
    tokens = row["token_ids"]
    assert isinstance(tokens, list)
    response = tokens[int(str(row["prompt_length"])) :]
    assert response == [*tokenizer.encode("2", add_special_tokens=False), tokenizer.eos_token_id]
    assert row["response_length"] == row["masked"] == len(response)
    assert "1+1?" in tokenizer.decode(tokens[: int(str(row["prompt_length"]))])
    assert failed["token_ids"] == []


@pytest.mark.parametrize(
    ("pairs", "why"),
    [
        (
            [],
            (
                "no column 'prompt' for 'prompt'; there are q, text, good, model; "
                "name it with --map prompt=COLUMN"
            ),
        ),
        (["prompt=q", "response=txt"], "no column 'txt' .*did you mean 'text'"),
        (["prompt=q", "response=*.text"], "no column has the fields text"),
        (
            ["prompt=q", "response=text", "reward=model"],
            "row 0: a reward is a number, true or false; found 'a'",
        ),
        (["prompt=q", "respons=text"], "unknown field 'respons'.*did you mean 'response'"),
        (["prompt"], "wanted FIELD=COLUMN"),
    ],
)
def test_a_mapping_that_does_not_fit_is_refused(tmp_path: Path, pairs: list[str], why: str) -> None:
    file = write(tmp_path / "long.jsonl", LONG)
    with pytest.raises(ConfigError, match=why):
        import_experiences([file], tmp_path / "run", mapped=ColumnMapping.parse(pairs))
    assert [path.name for path in tmp_path.iterdir()] == ["long.jsonl"]


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    file = write(tmp_path / "long.jsonl", LONG)
    (tmp_path / "run").mkdir()
    with pytest.raises(StoreError, match="exists already"):
        import_experiences([file], tmp_path / "run", mapped=LONG_MAP)
    with pytest.raises(ConfigError, match="there is no file"):
        import_experiences([tmp_path / "other.jsonl"], tmp_path / "new", mapped=LONG_MAP)


def test_real_solutions_become_preference_pairs(tmp_path: Path) -> None:
    if not SOLUTIONS.exists():
        pytest.skip("../shared/gsm8k_solutions is not there")
    run, pairs = tmp_path / "solutions", tmp_path / "pairs"
    maps = [part for pair in MAP for part in ("--map", pair)]
    calls = (
        ["import", str(SOLUTIONS), "--as", "experiences", "--to", str(run), *maps],
        ["export", str(run), "dpo", "--to", str(pairs)],
    )
    printed = [CliRunner().invoke(cli, call, catch_exceptions=False).output for call in calls]
    assert "5,276 experiences of 1,319 tasks, 5,276 with a reward" in printed[0]
    records = [json.loads(line) for line in SOLUTIONS.read_text().splitlines()]
    models = list(records[0])[2:]
    correct = {name: sum(record[name]["is_correct"] for record in records) for name in models}
    found = asked(run, "SELECT explorer, sum(raw_reward)::INT AS n FROM experiences GROUP BY ALL")
    assert {row["explorer"]: row["n"] for row in found} == correct
    mixed = [
        record for record in records if 0 < sum(record[name]["is_correct"] for name in models) < len(models)
    ]
    read = load_dataset(str(pairs), split="train", cache_dir=str(tmp_path / "cache"))
    assert read.num_rows == len(mixed) == 731
    for pair, record in zip(read, mixed, strict=True):
        verdicts = {record[name]["solution"]: record[name]["is_correct"] for name in models}
        assert pair["prompt"] == [{"role": "user", "content": record["question"]}]
        assert verdicts[pair["chosen"][0]["content"]] and not verdicts[pair["rejected"][0]["content"]]
