"""Data sets made for TRL and verifiers, in the shapes in which they are published, from lines and Parquet."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from trinity_data.config import ExperienceBufferConfig, FormatConfig, TasksetConfig
from trinity_data.dataset.reader import Source, dataset_spec
from trinity_data.dataset.task import build_task_rows, missing_columns, tasks_from_table
from trinity_trainer.answers import answers_of, shape_of

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "task_set.md").read_text()
SHAPES = re.findall(r"^\| ((?:TRL|verifiers)[^|]*) \| `(\{.*\})` \|(.*)\|$", PAGE, flags=re.MULTILINE)
USER = {"role": "user", "content": "2+3?"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def written(folder: Path, kind: str, row: dict[str, Any]) -> Path:
    """A set of two such rows."""
    file = folder / f"train.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist([row, row]), file)
    else:
        file.write_text(f"{json.dumps(row)}\n" * 2)
    return file


@pytest.mark.parametrize(("name", "text", "form"), SHAPES, ids=[name for name, _, _ in SHAPES])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_every_set_of_the_table_is_read_as_it_is(
    tmp_path: Path, kind: str, name: str, text: str, form: str
) -> None:
    row: dict[str, Any] = json.loads(text)
    keys = {key: yaml.safe_load(value) for key, value in re.findall(r"`(\w+): ([^`]+)`", form)}
    config = TasksetConfig(
        name="s", path=str(written(tmp_path, kind, row)), format=FormatConfig(**keys),
        default_reward_fn_type="./mine.py:reward",
    )  # fmt: skip
    source = Source(dataset_spec(config))
    assert missing_columns(config, source.columns()) == []
    built = build_task_rows(
        config, source.rows([0, 1]), stage="rl", source=source.name, source_rows=[0, 1], first_position=0
    )
    assert built.reasons == ["", ""]
    task = tasks_from_table(built.tasks)[1]
    assert task.messages[-1] == USER and len(task.messages) == (2 if "Add." in text else 1)
    assert task.answer == ("" if "only" in name else "5")
    assert dict(task.columns) == row
    assert built.for_operators().num_rows == 2


def test_the_table_has_the_sets_that_are_published() -> None:
    assert [name.partition(",")[0] for name, _, _ in SHAPES] == ["TRL"] * 7 + ["verifiers"] * 3


PREFERENCES = {
    "explicit": {"prompt": [USER], "chosen": "5", "rejected": "6"},
    "implicit": {"chosen": [USER, "5"], "rejected": [USER, "6"], "score_chosen": 8.0, "score_rejected": 2.0},
    "both": {"prompt": "2+3?", "chosen": [USER, "5"], "rejected": [USER, "6"], "messages": [USER, "5"]},
}


@pytest.mark.parametrize("name", PREFERENCES)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_preferences_are_pairs_to_train_on(tmp_path: Path, kind: str, name: str) -> None:
    def dialogue(value: Any) -> Any:
        if not isinstance(value, list) or not any(isinstance(each, str) for each in value):
            return value
        return [{"role": "assistant", "content": each} if isinstance(each, str) else each for each in value]

    row = {key: dialogue(value) for key, value in PREFERENCES[name].items()}
    config = ExperienceBufferConfig(
        storage_type="file", schema_type="dpo", path=str(written(tmp_path, kind, row))
    )
    source = Source(dataset_spec(config))
    (read,) = source.rows([1])
    chosen, rejected = answers_of(config, shape_of(config, source.columns()), read)
    assert (chosen.reason, rejected.reason) == ("", "")
    assert chosen.messages == [USER] and (chosen.text, rejected.text) == ("5", "6")
